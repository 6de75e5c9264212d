//! What the GPU finds in logits against what the host finds, bit for bit.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Gpu, gpu};
use crate::device::cuda::CudaDevice;
use crate::device::cuda::sampling::LEAST_SCRATCH_BYTES;
use crate::device::{Arena, Device, LogitsReader, RowAnswer, RowQuery, Step, StepInputs};
use crate::request::SamplingParams;
use crate::sampling::{Sampler, SamplerScratch, log_sum_exp, logprob};

/// Position of the tokens that are drawn.
const INDEX: usize = 3;
/// Number of the first row.
const FIRST: usize = 5;

/// What one row is wanted for.
enum Wanted {
    Score(u32),
    Draw(Vec<Sampler>),
}

impl Wanted {
    fn draw(params: &SamplingParams, draws: usize) -> Self {
        Self::draw_after(params, draws, &[1], &[])
    }

    fn draw_after(params: &SamplingParams, draws: usize, prompt: &[u32], generated: &[u32]) -> Self {
        let params = Arc::new(params.clone());
        let sampler = |n| Sampler::new(Arc::clone(&params), &[2], 77, n, prompt, generated);
        Wanted::Draw((0..draws).map(sampler).collect())
    }
}

/// In words, so that zeros of different signs differ; all numbers that are not finite are the same.
fn score(logprob: f32) -> Vec<String> {
    vec![if logprob.is_finite() { format!("{logprob:?}") } else { "not finite".into() }]
}

fn on_host(wanted: &Wanted, logits: &[f32]) -> Vec<String> {
    match wanted {
        Wanted::Score(token) => score(logprob(logits, log_sum_exp(logits), *token)),
        Wanted::Draw(samplers) => {
            let scratch = &mut SamplerScratch::default();
            samplers.iter().map(|one| format!("{:?}", one.sample(logits, INDEX, scratch))).collect()
        }
    }
}

/// A row's result, and whether the device answered.
type Taken = (Vec<String>, bool);

struct Reader {
    wanted: Vec<Wanted>,
    results: Vec<Mutex<Option<Taken>>>,
}

impl Reader {
    fn put(&self, row: usize, result: Vec<String>, answered: bool) {
        let before = self.results[row - FIRST].lock().replace((result, answered));
        assert!(before.is_none(), "each row comes once");
    }
}

impl LogitsReader for Reader {
    fn query(&self, row: usize) -> RowQuery {
        match &self.wanted[row - FIRST] {
            Wanted::Score(token) => RowQuery { token: Some(*token), ..RowQuery::default() },
            Wanted::Draw(samplers) => {
                let mut query = samplers[0].query(INDEX);
                if let Some(draw) = &mut query.draw {
                    draw.random = samplers.iter().map(|sampler| sampler.random(INDEX)).collect();
                }
                query
            }
        }
    }

    fn take_answer(&self, row: usize, answer: &RowAnswer) {
        let result = match &self.wanted[row - FIRST] {
            Wanted::Score(_) => score(answer.token_logit - answer.log_sum_exp()),
            Wanted::Draw(samplers) => {
                let take =
                    |(at, sampler): (usize, &Sampler)| format!("{:?}", sampler.take(answer, at, INDEX));
                (0..).zip(samplers).map(take).collect()
            }
        };
        self.put(row, result, true);
    }

    fn take_logits(&self, row: usize, logits: &[f32]) {
        self.put(row, on_host(&self.wanted[row - FIRST], logits), false);
    }
}

/// Memory for logits, and for a step's scratch.
struct Memory {
    logits: Arena,
    step: Arena,
    scratch: Arena,
}

impl Memory {
    fn new(device: &CudaDevice, scratch_bytes: usize) -> Self {
        let arena = |bytes| device.reserve("test", bytes).unwrap();
        let mut memory = Self { logits: arena(8 << 20), step: arena(4096), scratch: arena(1 << 20) };
        memory.step.commit(256).unwrap();
        memory.scratch.commit(scratch_bytes).unwrap();
        memory
    }

    /// Has rows of the committed logits read.
    fn read(&mut self, device: &CudaDevice, vocab: usize, rows: usize, reader: &dyn LogitsReader) {
        let mut step = Step {
            inputs: StepInputs::default(),
            memory: self.step.view_mut(0, self.step.committed()),
            scratch: self.scratch.view_mut(0, self.scratch.committed()),
        };
        let logits = self.logits.view_mut(0, rows * vocab);
        device.read_logits(&mut step, logits, vocab, FIRST, reader).unwrap();
    }

    /// Reads rows, and compares with what the host makes of them. Gives which rows the device answered.
    fn check(&mut self, device: &CudaDevice, rows: &[Vec<f32>], wanted: Vec<Wanted>) -> Vec<bool> {
        let vocab = rows[0].len();
        let bytes: Vec<u8> = rows.concat().iter().flat_map(|logit| logit.to_le_bytes()).collect();
        device.commit_with(&mut self.logits, &bytes).unwrap();
        let results = rows.iter().map(|_| Mutex::default()).collect();
        let reader = Reader { wanted, results };
        self.read(device, vocab, rows.len(), &reader);
        self.logits.decommit();
        let mut answered = Vec::new();
        for ((row, wanted), result) in rows.iter().zip(&reader.wanted).zip(reader.results) {
            let (result, by_device) = result.into_inner().expect("each row comes");
            assert_eq!(result, on_host(wanted, row), "{vocab} tokens");
            answered.push(by_device);
        }
        answered
    }
}

/// Small numbers from a seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % limit as u64) as usize
    }

    /// From 0 to 1.
    fn share(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 24) as f32
    }

    fn of<T: Copy>(&mut self, choice: &[T]) -> T {
        choice[self.below(choice.len())]
    }

    fn logits(&mut self, vocab: usize) -> Vec<f32> {
        let kind = self.below(9);
        let scale = self.of(&[1e-3, 0.02, 1.0, 4.0, 30.0]);
        let one = |numbers: &mut Self, token: usize| match kind {
            0 => (numbers.below(4) as f32) * scale,
            1 => scale,
            2 => numbers.of(&[0.0, -0.0]),
            3 => numbers.of(&[f32::NEG_INFINITY, numbers.0 as f32 % 7.0, -2.5]),
            4 => numbers.of(&[f32::MIN, f32::MAX, 1.0, f32::NEG_INFINITY, f32::from_bits(1)]),
            5 => 17.0 + (numbers.below(3000) as f32) * 2e-6,
            6 => -(token as f32) * scale,
            _ => (0..6).map(|_| numbers.share() - 0.5).sum::<f32>() * 3.0 * scale,
        };
        let mut logits: Vec<f32> = (0..vocab).map(|token| one(self, token)).collect();
        let place = self.below(vocab);
        match self.below(40) {
            0 => logits[place] = f32::NAN,
            1 => logits[place] = f32::INFINITY,
            2 => logits.fill(f32::NEG_INFINITY),
            3 => logits[place] = -f32::NAN,
            4 => logits[place] = f32::NEG_INFINITY,
            _ => {}
        }
        logits
    }

    /// Up to `limit` tokens, some of which the vocabulary may not have.
    fn tokens(&mut self, vocab: usize, limit: usize) -> Vec<u32> {
        (0..self.below(limit + 1)).map(|_| self.below(vocab + 2) as u32).collect()
    }

    /// Adds what changes logits.
    fn processors(&mut self, vocab: usize, params: &mut SamplingParams) {
        if self.below(3) == 0 {
            let most = self.of(&[0, 1, 5, vocab]);
            params.allowed_tokens = Some(self.tokens(vocab, most));
        }
        params.min_new_tokens = self.of(&[0, INDEX, INDEX + 1]);
        params.stop_token_ids = self.tokens(vocab, 4);
        let extreme = self.below(3) == 0;
        let biases = match extreme {
            true => [0.0, -0.0, 1.5, -40.0, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.3],
            false => [0.25, 1.5, -2.0, 0.125, -0.5, -1.0, 0.75, f32::NEG_INFINITY],
        };
        let bias = |numbers: &mut Self, token| (token, numbers.of(&biases));
        params.logit_bias = self.tokens(vocab, 7).into_iter().map(|token| bias(self, token)).collect();
        params.repetition_penalty = self.of(&[1.0, 1.0, 1.3, 0.5]);
        params.frequency_penalty = self.of(&[0.0, 0.2, -0.4]);
        params.presence_penalty = self.of(&[0.0, 0.7, -0.1]);
        if extreme {
            params.repetition_penalty = self.of(&[0.5, f32::from_bits(1), f32::MAX]);
            params.frequency_penalty = self.of(&[0.2, f32::MAX, f32::MIN]);
            params.presence_penalty = self.of(&[0.7, f32::MIN]);
        }
    }

    fn params(&mut self, vocab: usize) -> SamplingParams {
        let (some, few) = (1 + self.below(vocab), 1 + self.below(5));
        SamplingParams {
            temperature: self.of(&[0.0, 1.0, 1.0, 0.7, 1.3, 0.01, 50.0, 1e-30, 1e30, f32::from_bits(1)]),
            top_k: self.of(&[0, 0, 1, few, some, vocab, vocab + 1, usize::MAX]),
            top_p: self.of(&[1.0, 1.0, 0.0, 1e-9, 0.1, 0.5, 0.9, 0.999_999, 0.999_999_94]),
            min_p: self.of(&[0.0, 0.0, f32::from_bits(1), 0.01, 0.3, 1.0]),
            top_logprobs: self.of(&[0, 0, 1, 3, 256]),
            processed_logprobs: true,
            return_kept_set: self.below(2) == 0,
            ..SamplingParams::default()
        }
    }
}

/// Rows of these vocabularies, a few in each launch, of all kinds of requests.
fn random_rows(vocabularies: &[usize], rounds: Range<u64>) {
    let (gpu, device) = gpu();
    let mut memory = Memory::new(&device, 1 << 20);
    for round in rounds {
        if let Gpu::Emulated(emulated) = gpu {
            emulated.set_seed(round + 1);
        }
        let numbers = &mut Numbers(round);
        for &vocab in vocabularies {
            let rows: Vec<Vec<f32>> = (0..1 + numbers.below(6)).map(|_| numbers.logits(vocab)).collect();
            let wanted = |_: &Vec<f32>| match numbers.below(4) {
                0 => Wanted::Score(numbers.below(vocab) as u32),
                1 => Wanted::draw(&numbers.params(vocab), 1 + numbers.below(12)),
                _ => {
                    let mut params = numbers.params(vocab);
                    numbers.processors(vocab, &mut params);
                    let (prompt, generated) = (numbers.tokens(vocab, 9), numbers.tokens(vocab, 20));
                    Wanted::draw_after(&params, 1 + numbers.below(4), &prompt, &generated)
                }
            };
            let wanted = rows.iter().map(wanted).collect();
            let answered = memory.check(&device, &rows, wanted);
            assert!(answered.iter().all(|&answered| answered));
        }
    }
    drop((memory, device));
    gpu.assert_clean();
}

#[test]
fn small_vocabularies_equal_the_hosts() {
    random_rows(&[1, 2, 15, 16, 17, 31, 32, 33, 64, 100], 0..60);
}

#[test]
fn large_vocabularies_equal_the_hosts() {
    random_rows(&[1000, 2100, 5003], 0..25);
}

#[test]
fn a_row_of_many_tiles_and_pieces_equals_the_hosts() {
    random_rows(&[40_000], 0..4);
}

/// So many tokens of one interval that they are not listed, all equal or not, below others and not.
#[test]
fn crowded_intervals_equal_the_hosts() {
    let (gpu, device) = gpu();
    let mut memory = Memory::new(&device, LEAST_SCRATCH_BYTES);
    let vocab = 1500;
    let equal = vec![2.5; vocab];
    let close: Vec<f32> = (0..vocab).map(|token| 9.0 + (token * 7919 % 1500) as f32 * 1e-6).collect();
    let below = |mut logits: Vec<f32>| {
        logits[700] = 12.0;
        logits[3] = 11.0;
        logits[1499] = -90.0;
        logits
    };
    let far: Vec<f32> = (0..vocab).map(|token| if token == 9 { 80.0 } else { -(token as f32) }).collect();
    for rows in [equal.clone(), close.clone(), below(equal), below(close), far] {
        for (top_k, top_p, temperature) in
            [(700, 1.0, 1.0), (1498, 1.0, 0.5), (0, 0.6, 1.0), (1200, 0.99, 30.0), (0, 0.03, 2.0)]
        {
            let params = SamplingParams {
                temperature,
                top_k,
                top_p,
                top_logprobs: 256,
                return_kept_set: true,
                ..SamplingParams::default()
            };
            assert_eq!(
                memory.check(&device, std::slice::from_ref(&rows), vec![Wanted::draw(&params, 3)]),
                [true]
            );
        }
    }
    drop((memory, device));
    gpu.assert_clean();
}

/// Random bits that fall just on the limits of tokens' shares, and just before.
#[test]
fn the_shares_of_tokens_begin_and_end_exactly() {
    struct Shares(Mutex<Vec<u32>>, usize);
    impl LogitsReader for Shares {
        fn query(&self, _row: usize) -> RowQuery {
            let each = u64::MAX / self.1 as u64 + 1;
            let random =
                (0..self.1 as u64).flat_map(|token| [token * each, token * each + (each - 1)]).collect();
            let mut query = Sampler::new(Arc::default(), &[], 0, 0, &[], &[]).query(INDEX);
            query.draw.as_mut().unwrap().random = random;
            query
        }
        fn take_answer(&self, _row: usize, answer: &RowAnswer) {
            *self.0.lock() = answer.drawn.iter().map(|drawn| drawn.token).collect();
        }
        fn take_logits(&self, _row: usize, _logits: &[f32]) {
            panic!("there is room");
        }
    }
    let (gpu, device) = gpu();
    let mut memory = Memory::new(&device, LEAST_SCRATCH_BYTES);
    // Every third token has a weight.
    for (vocab, shares) in [(6, 2), (192, 64), (6144, 2048)] {
        let logits = (0..vocab).map(|token| if token % 3 == 1 { 4.0_f32 } else { f32::NEG_INFINITY });
        let bytes: Vec<u8> = logits.flat_map(f32::to_le_bytes).collect();
        device.commit_with(&mut memory.logits, &bytes).unwrap();
        let reader = Shares(Mutex::default(), shares);
        memory.read(&device, vocab, 1, &reader);
        memory.logits.decommit();
        let expected: Vec<u32> = (0..shares as u32).flat_map(|share| [3 * share + 1; 2]).collect();
        assert_eq!(reader.0.into_inner(), expected);
    }
    drop((memory, device));
    gpu.assert_clean();
}

/// Rows for which there is no room, in between others; the rest takes several launches.
#[test]
fn the_host_reads_what_has_no_room() {
    let (gpu, device) = gpu();
    let mut memory = Memory::new(&device, 4096);
    let vocab = 900;
    let rows: Vec<Vec<f32>> =
        (0..9).map(|row| (0..vocab).map(|t| ((t * row) % 23) as f32).collect()).collect();
    let plain = SamplingParams { top_logprobs: 5, ..SamplingParams::default() };
    let penalised = SamplingParams { repetition_penalty: 1.5, ..plain.clone() };
    let prompt: Vec<u32> = (0..700).collect();
    let wanted = (0..9).map(|row| match row {
        1 | 2 | 7 => Wanted::draw_after(&penalised, 2, &prompt, &[3]),
        4 => Wanted::draw(&plain, 600),
        5 => Wanted::Score(899),
        6 => Wanted::draw(&penalised, 2),
        _ => Wanted::draw(&plain, 60),
    });
    let answered = memory.check(&device, &rows, wanted.collect());
    let by_host: Vec<usize> = (0..9).filter(|&row| !answered[row]).collect();
    assert_eq!(by_host, [1, 2, 4, 7]);
    drop((memory, device));
    gpu.assert_clean();
}
