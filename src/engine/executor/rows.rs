//! From a plan to rows of tokens, and from rows of logits to what they were asked for.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::Executor;
use crate::completion::RequestId;
use crate::device::{Device, DeviceError, LogitsReader, RowAnswer, RowQuery};
use crate::engine::requests::LiveRequest;
use crate::model::{Batch, BatchSpan};
use crate::request::TokenId;
use crate::sampling::{SampleError, Sampled, Sampler, SamplerScratch, log_sum_exp, logprob};
use crate::scheduler::{SeqId, StepPlan};
use crate::weights::ResidentWeights;

/// Why a row's logits were asked for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wanted {
    /// Logprob of the prompt's token at `position`, given those before it.
    Prompt { request: RequestId, position: usize },
    /// The next token of this sequence (and of its forks).
    Next { seq: SeqId },
}

/// What came of a row's logits. Applied when the whole step has succeeded.
pub(super) enum Row {
    Prompt { request: RequestId, position: usize, logprob: f32 },
    Next { seq: SeqId, samples: Vec<(usize, Result<Sampled, SampleError>)> },
}

impl Executor {
    /// Lays out the step's rows, and says which logits are wanted and why.
    pub(super) fn batch(&self, plan: &StepPlan) -> (Batch, Vec<Wanted>) {
        let mut batch = Batch::default();
        let mut wanted = Vec::new();
        batch.copies = plan.copies.iter().map(|(from, to)| (from.0, to.0)).collect();
        for chunk in &plan.chunks {
            let sequence = self.scheduler.sequence(chunk.seq).expect("a planned sequence is live");
            let (request, _) = self.sequences[&chunk.seq];
            let request = &self.requests[&request];
            let table: Vec<u32> = sequence.blocks().iter().map(|block| block.0).collect();
            let first_row = batch.tokens.len();
            let scores = request.wants_prompt_logprobs() && self.scores_prompt(request, chunk.seq);
            batch.slots.extend(self.scheduler.slots(chunk.seq, chunk.positions.clone()));
            for position in chunk.positions.clone() {
                let row = batch.tokens.len() as u32;
                batch.tokens.push(sequence.tokens()[position]);
                batch.positions.push(position as u32);
                let next = position + 1;
                if scores && next < request.prompt().len() && next > request.prompt_logprobs.len() {
                    batch.logit_rows.push(row);
                    wanted.push(Wanted::Prompt { request: request.id, position: next });
                }
            }
            if chunk.samples {
                batch.logit_rows.push(batch.tokens.len() as u32 - 1);
                wanted.push(Wanted::Next { seq: chunk.seq });
            }
            batch.spans.push(BatchSpan {
                first_row,
                rows: chunk.positions.len(),
                first_position: chunk.positions.start,
                block_table: table,
            });
        }
        (batch, wanted)
    }

    /// Whether this sequence is the one of its request that computes the prompt's logprobs.
    fn scores_prompt(&self, request: &LiveRequest, seq: SeqId) -> bool {
        request.samples.iter().find_map(|sample| sample.seq) == Some(seq)
    }

    pub(super) fn compute(
        &mut self,
        weights: &ResidentWeights,
        batch: &Batch,
        wanted: &[Wanted],
    ) -> Result<Vec<Row>, DeviceError> {
        let parts = Arc::clone(&self.parts);
        let (kv, workspace) = (&mut self.kv, &mut self.workspace);
        let reader = Reader {
            requests: &self.requests,
            sequences: &self.sequences,
            scratches: &self.scratches,
            device: &*parts.device,
            wanted,
            rows: wanted.iter().map(|_| OnceLock::new()).collect(),
        };
        parts.transformer.forward(&*parts.device, weights, kv, workspace, batch, &reader)?;
        Ok(reader.rows.into_iter().map(|row| row.into_inner().expect("each row's logits came")).collect())
    }
}

/// Makes of each row's logits what they are wanted for.
struct Reader<'a> {
    requests: &'a BTreeMap<RequestId, LiveRequest>,
    sequences: &'a BTreeMap<SeqId, (RequestId, usize)>,
    scratches: &'a Mutex<Vec<SamplerScratch>>,
    device: &'a dyn Device,
    wanted: &'a [Wanted],
    rows: Vec<OnceLock<Row>>,
}

impl Reader<'_> {
    fn put(&self, row: usize, result: Row) {
        assert!(self.rows[row].set(result).is_ok(), "each row's logits come once");
    }

    /// The request of a sequence, and which of its samples are drawn from the sequence's logits: its own, or all if
    /// they are to be forked from it; none for a request that only scores its prompt.
    fn drawn(&self, seq: SeqId) -> (&LiveRequest, Range<usize>) {
        let (request, sample) = self.sequences[&seq];
        let request = &self.requests[&request];
        if request.request.params.max_new_tokens == 0 || request.samples[sample].ended {
            return (request, 0..0);
        }
        let all_start =
            sample == 0 && request.samples.iter().all(|s| !s.ended && s.completion.tokens.is_empty());
        (request, if all_start { 0..request.samples.len() } else { sample..sample + 1 })
    }

    fn score(&self, row: usize, logprob: impl FnOnce(TokenId) -> f32) {
        if let Wanted::Prompt { request, position } = self.wanted[row] {
            let logprob = logprob(self.requests[&request].prompt()[position]);
            self.put(row, Row::Prompt { request, position, logprob });
        }
    }

    /// `draw` is given a sample, how many are drawn before it, and its number of tokens.
    fn sample(
        &self,
        row: usize,
        draw: impl Fn(&Sampler, usize, usize) -> Result<Sampled, SampleError> + Sync,
    ) {
        let Wanted::Next { seq } = self.wanted[row] else { return };
        let (request, drawn) = self.drawn(seq);
        let results: Vec<OnceLock<_>> = drawn.clone().map(|_| OnceLock::new()).collect();
        self.device.share_out(results.len(), &|at| {
            let live = &request.samples[drawn.start + at];
            let sampled = draw(live.sampler(), at, live.completion.tokens.len());
            assert!(results[at].set(sampled).is_ok(), "each sample is drawn once");
        });
        let results = results.into_iter().map(|result| result.into_inner().expect("each sample was drawn"));
        self.put(row, Row::Next { seq, samples: drawn.zip(results).collect() });
    }
}

impl LogitsReader for Reader<'_> {
    fn query(&self, row: usize) -> RowQuery {
        let seq = match self.wanted[row] {
            Wanted::Prompt { request, position } => {
                let token = self.requests[&request].prompt()[position];
                return RowQuery { token: Some(token), ..RowQuery::default() };
            }
            Wanted::Next { seq } => seq,
        };
        let (request, drawn) = self.drawn(seq);
        let mut samples = request.samples[drawn].iter();
        let Some(first) = samples.next() else { return RowQuery::default() };
        // Samples that are drawn from the same logits have the same tokens, so what holds for one does for all.
        let index = first.completion.tokens.len();
        let mut query = first.sampler().query(index);
        if let Some(draw) = &mut query.draw {
            draw.random.extend(samples.map(|sample| sample.sampler().random(index)));
        }
        query
    }

    fn take_answer(&self, row: usize, answer: &RowAnswer) {
        self.score(row, |_| answer.token_logit - answer.log_sum_exp());
        self.sample(row, |sampler, at, index| sampler.take(answer, at, index));
    }

    fn take_logits(&self, row: usize, logits: &[f32]) {
        self.score(row, |token| logprob(logits, log_sum_exp(logits), token));
        self.sample(row, |sampler, _, index| {
            let mut scratch = self.scratches.lock().pop().unwrap_or_default();
            let sampled = sampler.sample(logits, index, &mut scratch);
            self.scratches.lock().push(scratch);
            sampled
        });
    }
}
