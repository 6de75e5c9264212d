//! Decode, prefill and sampling on the model.

use std::time::Duration;

use dormouse::{Awake, Engine, Request, SamplingParams};

use super::Options;
use super::common::report::{Cell, Report};
use super::common::{Outcome, gb_per_s, median, timed};

/// Tokens of a prompt where its length is not the question.
const PROMPT: usize = 8;

/// What a step costs at least.
#[derive(Debug)]
pub(crate) struct Costs {
    /// Weights that a step reads: all but an embedding that isn't the head as well.
    pub(crate) step_bytes: u64,
    /// Elements of the layers' matrices: each takes part in each token.
    layer_elements: f64,
    head_elements: f64,
    /// Query heads times their size, summed over layers.
    q_width: f64,
}

impl Costs {
    pub(crate) fn of(engine: &Engine<Awake>) -> Self {
        let tensors = engine.expected_weights().tensors();
        let tied = !tensors.iter().any(|tensor| tensor.name == "lm_head.weight");
        let mut costs = Self { step_bytes: 0, layer_elements: 0.0, head_elements: 0.0, q_width: 0.0 };
        for tensor in tensors {
            let elements: usize = tensor.shape.iter().product();
            let embedding = tensor.name == "model.embed_tokens.weight";
            if !embedding || tied {
                costs.step_bytes += (elements * tensor.dtype.size()) as u64;
            }
            if tensor.name == "lm_head.weight" || (embedding && tied) {
                costs.head_elements = elements as f64;
            } else if tensor.shape.len() == 2 && !embedding {
                costs.layer_elements += elements as f64;
            }
            if tensor.name.ends_with("q_proj.weight") {
                costs.q_width += tensor.shape[0] as f64;
            }
        }
        costs
    }

    pub(crate) fn print(&self, options: &Options, engine: &Engine<Awake>) {
        let (family, layers) = (engine.config().family(), engine.config().num_layers());
        let (model, megabytes) = (options.model.display(), self.step_bytes as f64 / 1e6);
        println!("{model}: {family:?}, {layers} layers, a step reads {megabytes:.1} MB of weights");
    }

    /// Floating-point operations of a prompt, of whose last token the logits are wanted.
    fn prefill_flop(&self, tokens: usize) -> f64 {
        let tokens = tokens as f64;
        let pairs = tokens * (tokens + 1.0) / 2.0;
        2.0 * self.layer_elements * tokens + 2.0 * self.head_elements + 4.0 * self.q_width * pairs
    }
}

/// A prompt of ordinary tokens, another for each `number`.
fn prompt(engine: &Engine<Awake>, tokens: usize, number: usize) -> Vec<u32> {
    let vocab = engine.config().vocab_size() as u64;
    let mut state = number as u64 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab) as u32
    };
    (0..tokens).map(|_| next()).collect()
}

/// Median time of a step that decodes `batch` sequences, all further requests being like `request`.
pub(crate) fn decode_step(
    engine: &Engine<Awake>,
    requests: Vec<Request>,
    batch: usize,
    steps: usize,
) -> Outcome<Duration> {
    for request in requests {
        engine.submit(request.max_new_tokens(steps + 64).ignore_eos(true))?;
    }
    let mut times = Vec::new();
    // Prompts first, in as many steps as they need, and one decode step to warm up.
    let mut decodes = 0;
    while times.len() < steps {
        let (step, time) = timed(|| engine.step());
        let step = step?;
        if (step.computed_tokens, step.sampled_tokens) == (batch, batch) {
            decodes += 1;
            if decodes > 1 {
                times.push(time);
            }
        }
        if step.is_idle() {
            return Err("the requests ended before enough steps were timed".into());
        }
    }
    engine.abort_all();
    Ok(median(times))
}

/// Decode at several batch sizes and with a long context. Returns the batches and their step times.
pub(crate) fn decode(
    options: &Options,
    engine: &Engine<Awake>,
    costs: &Costs,
    limit: f64,
    report: &mut Report,
) -> Outcome<Vec<(usize, Duration)>> {
    let mut rows = Vec::new();
    let mut steps = Vec::new();
    let mut note = |name: String, batch: usize, time: Duration| {
        let rate = gb_per_s(costs.step_bytes, time);
        rows.push(vec![
            Cell::Text(name),
            Cell::Number(batch as f64 / time.as_secs_f64(), 1),
            Cell::Number(time.as_secs_f64() * 1e3, 3),
            Cell::Number(rate, 1),
        ]);
    };
    let greedy = |tokens, number| Request::new(prompt(engine, tokens, number)).temperature(0.0);
    for (batch, times) in [(1, (64, 24)), (4, (48, 12)), (16, (32, 8)), (64, (16, 3))] {
        let requests = (0..batch).map(|number| greedy(PROMPT, number)).collect();
        let time = decode_step(engine, requests, batch, options.times(times.0, times.1))?;
        note(format!("batch {batch}"), batch, time);
        steps.push((batch, time));
    }
    let context = 1000.min(engine.limits().max_model_len.saturating_sub(128));
    let times = options.times(32, 8);
    let time = decode_step(engine, vec![greedy(context, 1000)], 1, times)?;
    note(format!("batch 1, context {context}"), 1, time);
    let group = vec![Request::new(prompt(engine, context, 1001)).samples(16).seed(1)];
    let time = decode_step(engine, group, 16, options.times(16, 4))?;
    note(format!("16 samples of a prompt, context {context}"), 16, time);
    // Other load comes and goes: the limit is the best of before and after.
    let limit = limit.max(options.read_limit());
    report.note("read_limit_gb_per_s", limit);
    for row in &mut rows {
        if let Cell::Number(rate, _) = row[3] {
            row.push(Cell::Number(100.0 * rate / limit, 0));
        }
    }
    let columns = ["decode", "tokens/s", "ms/step", "weights GB/s", "% of limit"];
    report.table(
        "decode",
        &format!("Decode (greedy, context {PROMPT} and on; limit {limit:.1} GB/s, caches can exceed it)"),
        &columns,
        &rows,
    );
    Ok(steps)
}

/// One prompt, in one step where it fits.
pub(crate) fn prefill(
    options: &Options,
    engine: &Engine<Awake>,
    costs: &Costs,
    report: &mut Report,
) -> Outcome {
    let tokens = 512.min(engine.limits().max_model_len - 1);
    let mut times = Vec::new();
    for number in 0..options.times(7, 3) {
        let request = Request::new(prompt(engine, tokens, 2000 + number)).temperature(0.0).max_new_tokens(1);
        let (outputs, time) = timed(|| engine.generate(&[request]));
        outputs?;
        times.push(time);
    }
    let time = median(times);
    let seconds = time.as_secs_f64();
    let row = vec![
        Cell::Text(format!("{tokens} tokens")),
        Cell::Number(tokens as f64 / seconds, 1),
        Cell::Number(seconds * 1e3, 1),
        Cell::Number(costs.prefill_flop(tokens) / seconds / 1e9, 1),
    ];
    report.table("prefill", "Prefill", &["prompt", "tokens/s", "ms", "GFLOP/s"], &[row]);
    Ok(())
}

/// What drawing a token costs, shared out to all threads: many samples of one prompt against one, the same
/// step otherwise. (A batch of one is sampled on one thread.)
pub(crate) fn sampling(
    options: &Options,
    engine: &Engine<Awake>,
    steps: &[(usize, Duration)],
    report: &mut Report,
) -> Outcome {
    const EXTRA: usize = 64;
    let first_step = |params: &SamplingParams, samples: usize| -> Outcome<Duration> {
        let mut times = Vec::new();
        for number in 0..options.times(15, 3) {
            let request = Request::new(prompt(engine, 1, 3000 + number)).params(params.clone());
            let request = request.samples(samples).max_new_tokens(1).seed(1);
            let (outputs, time) = timed(|| engine.generate(&[request]));
            outputs?;
            times.push(time);
        }
        Ok(median(times))
    };
    let params = |change: &dyn Fn(Request) -> Request| change(Request::new([0])).params;
    let kinds = [
        ("greedy", params(&|request| request.temperature(0.0))),
        ("temperature 1", params(&|request| request.temperature(1.0))),
        ("temperature 0.7, top-p 0.9", params(&|request| request.temperature(0.7).top_p(0.9))),
        ("temperature 0.7, top-k 50", params(&|request| request.temperature(0.7).top_k(50))),
    ];
    let mut rows = Vec::new();
    for (name, params) in kinds {
        let time = first_step(&params, 1 + EXTRA)?.saturating_sub(first_step(&params, 1)?);
        let each = time.as_secs_f64() / EXTRA as f64;
        let mut row = vec![name.into(), Cell::Number(each * 1e6, 1)];
        for &(batch, step) in steps {
            let threads = if batch == 1 { options.threads as f64 } else { 1.0 };
            row.push(Cell::Number(100.0 * each * batch as f64 * threads / step.as_secs_f64(), 2));
        }
        rows.push(row);
    }
    let shares: Vec<String> = steps.iter().map(|(batch, _)| format!("% of batch {batch}")).collect();
    let columns: Vec<&str> =
        ["sampling", "us/token"].into_iter().chain(shares.iter().map(|s| &**s)).collect();
    let vocab = engine.config().vocab_size();
    report.table("sampling", &format!("Sampling on all threads, a vocabulary of {vocab}"), &columns, &rows);
    Ok(())
}
