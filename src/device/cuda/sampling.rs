//! Logits are read where they are: what is asked of each row goes to the GPU, the answers come back.
#![allow(unsafe_code, reason = "a launch of a kernel")]

use std::ops::Range;

use super::kernels::{Arguments, Shape};
use super::{ALIGNMENT, CudaDevice};
use crate::device::{
    Device, DeviceError, DrawQuery, DrawnToken, LogitsReader, RowAnswer, RowQuery, Step, TokenLogit, ViewMut,
};

/// Scratch memory for queries and answers, at least. Rows that need more are read by the host.
pub(super) const LEAST_SCRATCH_BYTES: usize = 256 << 10;
/// Words of the structs of `kernels/sampling.cu`.
const QUERY_WORDS: usize = 20;
const ANSWER_WORDS: usize = 9;
const DRAW_WORDS: usize = 3;
/// Tokens for each thread of a block, before there are two warps and after there are 32.
const TOKENS_PER_THREAD: usize = 32;
const NO_TOKEN: u32 = u32::MAX;

/// A row with a query, and where its parts begin among their like.
struct Asked {
    row: usize,
    query: RowQuery,
    random: usize,
    change: usize,
    answer_word: usize,
}

impl Asked {
    fn draws(&self) -> usize {
        self.query.draw.as_ref().map_or(0, |draw| draw.random.len())
    }

    /// Changes, of each kind.
    fn changes(&self) -> [usize; 4] {
        let Some(DrawQuery { changes, .. }) = &self.query.draw else { return [0; 4] };
        let allowed = changes.allowed.as_ref().map_or(0, Vec::len);
        [allowed, changes.banned.len(), changes.biased.len(), changes.seen.len()]
    }

    /// Words of the bits of tokens that can be drawn.
    fn kept_words(&self, vocab: usize) -> usize {
        let kept = self.query.draw.as_ref().is_some_and(|draw| draw.kept);
        if kept { vocab.div_ceil(32) } else { 0 }
    }

    fn answer_words(&self, vocab: usize) -> usize {
        ANSWER_WORDS + DRAW_WORDS * self.draws() + 2 * self.query.top + self.kept_words(vocab)
    }
}

/// Limits a query to what the vocabulary has.
fn limit(query: &mut RowQuery, vocab: usize) {
    query.top = query.top.min(vocab);
    let Some(draw) = &mut query.draw else { return };
    draw.top_k = if draw.top_k < vocab { draw.top_k } else { 0 };
    let exists = |&token: &u32| (token as usize) < vocab;
    let changes = &mut draw.changes;
    if let Some(allowed) = &mut changes.allowed {
        allowed.retain(exists);
    }
    changes.banned.retain(exists);
    changes.biased.retain(|(token, _)| exists(token));
    changes.seen.retain(|(token, _)| exists(token));
}

/// Rows that are asked about by one launch. In scratch memory lie the random numbers, the changes, the queries, room
/// for the logits that change, and the answers.
struct Launch {
    asked: Vec<Asked>,
    vocab: usize,
    random: usize,
    changes: usize,
    answer_words: usize,
}

impl Launch {
    fn new(vocab: usize) -> Self {
        Self { asked: Vec::new(), vocab, random: 0, changes: 0, answer_words: 0 }
    }

    fn changes_offset(&self) -> usize {
        8 * self.random
    }

    fn queries_offset(&self) -> usize {
        self.changes_offset() + 8 * self.changes
    }

    fn saved_offset(&self) -> usize {
        (self.queries_offset() + 4 * QUERY_WORDS * self.asked.len()).next_multiple_of(ALIGNMENT)
    }

    fn answers_offset(&self) -> usize {
        self.saved_offset() + (4 * self.changes).next_multiple_of(ALIGNMENT)
    }

    fn end(&self) -> usize {
        self.answers_offset() + 4 * self.answer_words
    }

    /// Adds a row; gives its query back if there is no room for it.
    fn push(&mut self, row: usize, query: RowQuery, room: usize) -> Option<RowQuery> {
        let (random, change, answer_word) = (self.random, self.changes, self.answer_words);
        let asked = Asked { row, query, random, change, answer_word };
        self.random += asked.draws();
        self.changes += asked.changes().iter().sum::<usize>();
        self.answer_words += asked.answer_words(self.vocab);
        self.asked.push(asked);
        if self.end() <= room {
            return None;
        }
        (self.random, self.changes, self.answer_words) = (random, change, answer_word);
        Some(self.asked.pop().expect("pushed just now").query)
    }

    /// The random numbers, the changes and the queries, as the kernel reads them.
    fn inputs(&self) -> Vec<u8> {
        let mut words = Vec::with_capacity(self.saved_offset() / 4);
        let draws = || self.asked.iter().filter_map(|asked| asked.query.draw.as_ref());
        for draw in draws() {
            words.extend(draw.random.iter().flat_map(|&random| [random as u32, (random >> 32) as u32]));
        }
        for DrawQuery { changes, .. } in draws() {
            let tokens = changes.allowed.iter().flatten().chain(&changes.banned);
            words.extend(tokens.flat_map(|&token| [token, 0]));
            words.extend(changes.biased.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]));
            words.extend(changes.seen.iter().flat_map(|&(token, generated)| [token, generated]));
        }
        for asked in &self.asked {
            words.extend(self.query_words(asked));
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn query_words(&self, asked: &Asked) -> [u32; QUERY_WORDS] {
        let count = |number: usize| u32::try_from(number).expect("kernels count in 32 bits");
        let draw = asked.query.draw.as_ref();
        let float = |of: &dyn Fn(&DrawQuery) -> f32| draw.map_or(0, |draw| of(draw).to_bits());
        let [allowed, banned, biased, seen] = asked.changes().map(count);
        [
            count(asked.row),
            asked.query.token.unwrap_or(NO_TOKEN),
            count(asked.query.top),
            count(asked.draws()),
            count(asked.random),
            u32::from(asked.kept_words(self.vocab) > 0),
            float(&|draw| draw.temperature),
            float(&|draw| draw.least_scaled),
            float(&|draw| draw.top_p),
            count(draw.map_or(0, |draw| draw.top_k)),
            count(asked.change),
            u32::from(draw.is_some_and(|draw| draw.changes.allowed.is_some())),
            allowed,
            banned,
            biased,
            seen,
            float(&|draw| draw.changes.repetition_penalty),
            float(&|draw| draw.changes.frequency_penalty),
            float(&|draw| draw.changes.presence_penalty),
            count(asked.answer_word),
        ]
    }

    /// The answer for a row, from those of all.
    fn answer(&self, asked: &Asked, answers: &[[u8; 4]]) -> RowAnswer {
        let words = &answers[asked.answer_word..][..asked.answer_words(self.vocab)];
        let word = |at: usize| u32::from_le_bytes(words[at]);
        let float = |at: usize| f32::from_bits(word(at));
        if word(0) == 0 {
            return RowAnswer::default();
        }
        let top = ANSWER_WORDS + DRAW_WORDS * asked.draws();
        let tops = (top..).step_by(2).take(word(4) as usize);
        let mut answer = RowAnswer {
            sound: true,
            greatest: float(1),
            exps: float(2),
            token_logit: float(3),
            top: tops.map(|at| TokenLogit { token: word(at), logit: float(at + 1) }).collect(),
            ..RowAnswer::default()
        };
        if asked.draws() > 0 && word(5) != 0 {
            let draws = (ANSWER_WORDS..top).step_by(DRAW_WORDS);
            let drawn = |at| DrawnToken { token: word(at), logit: float(at + 1), changed: float(at + 2) };
            answer.possible = true;
            answer.greatest_changed = float(6);
            answer.weight = u64::from(word(7)) | u64::from(word(8)) << 32;
            answer.drawn = draws.map(drawn).collect();
            answer.kept = set_bits(&words[top + 2 * asked.query.top..]).collect();
        }
        answer
    }
}

/// The numbers of the bits that are set.
fn set_bits(words: &[[u8; 4]]) -> impl Iterator<Item = u32> {
    let words = words.iter().map(|&word| u32::from_le_bytes(word));
    words
        .zip((0..).step_by(32))
        .flat_map(|(word, first)| (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit))
}

/// Threads of a block for a row of so many tokens.
fn block_for(vocab: usize) -> u32 {
    let threads = (vocab / TOKENS_PER_THREAD).next_multiple_of(32).clamp(64, 1024);
    u32::try_from(threads).expect("at most 1024")
}

impl CudaDevice {
    /// Has the reader take in rows of logits: the answers to its queries, or the logits if there is no room for them.
    pub(super) fn answer_queries(
        &self,
        step: &mut Step<'_>,
        mut logits: ViewMut<'_, f32>,
        vocab: usize,
        first: usize,
        reader: &dyn LogitsReader,
    ) -> Result<(), DeviceError> {
        let rows = logits.len() / vocab;
        assert_eq!(logits.len(), rows * vocab, "whole rows of logits");
        let room = step.scratch.len();
        let mut launch = Launch::new(vocab);
        let mut of_host = Vec::new();
        for row in 0..rows {
            let mut query = reader.query(first + row);
            assert!(query.token.is_none_or(|token| (token as usize) < vocab), "tokens are in the vocabulary");
            limit(&mut query, vocab);
            let Some(query) = launch.push(row, query, room) else { continue };
            self.answer(step, &mut logits, &launch, first, reader)?;
            launch = Launch::new(vocab);
            if launch.push(row, query, room).is_some() {
                of_host.push(row);
            }
        }
        self.answer(step, &mut logits, &launch, first, reader)?;
        for rows in runs(&of_host) {
            let logits = logits.as_view().slice(rows.start * vocab, rows.len() * vocab);
            self.show(logits, &mut |values| {
                self.share_out(rows.len(), &|at| {
                    reader.take_logits(first + rows.start + at, &values[at * vocab..][..vocab]);
                });
            })?;
        }
        Ok(())
    }

    fn answer(
        &self,
        step: &mut Step<'_>,
        logits: &mut ViewMut<'_, f32>,
        launch: &Launch,
        first: usize,
        reader: &dyn LogitsReader,
    ) -> Result<(), DeviceError> {
        if launch.asked.is_empty() {
            return Ok(());
        }
        let inputs = launch.inputs();
        self.write(step.scratch.slice(0, inputs.len()), &inputs)?;
        let scratch = step.scratch.address();
        let arguments = Arguments::new()
            .address(logits.address())
            .int(launch.vocab)
            .address(scratch + launch.queries_offset())
            .address(scratch)
            .address(scratch + launch.changes_offset())
            .address(scratch + launch.saved_offset())
            .address(scratch + launch.answers_offset());
        let shape = Shape::new([launch.asked.len(), 1, 1], block_for(launch.vocab));
        // SAFETY: `sample_rows`' arguments; the rows exist, each is asked about once, tokens are in the vocabulary, and
        // the scratch memory has room for all.
        unsafe { self.launch("read_logits", self.kernels.sample_rows, shape, arguments) }?;
        let mut answers = vec![0; 4 * launch.answer_words];
        self.read(step.scratch.as_view().slice(launch.answers_offset(), answers.len()), &mut answers)?;
        let answers = answers.as_chunks::<4>().0;
        self.share_out(launch.asked.len(), &|at| {
            let asked = &launch.asked[at];
            reader.take_answer(first + asked.row, &launch.answer(asked, answers));
        });
        Ok(())
    }
}

/// Ascending numbers as ranges.
fn runs(numbers: &[usize]) -> impl Iterator<Item = Range<usize>> {
    numbers.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[run.len() - 1] + 1)
}
