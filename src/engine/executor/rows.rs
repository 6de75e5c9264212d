//! From a plan to rows of tokens, and from rows of logits to what they were asked for.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::Executor;
use crate::completion::RequestId;
use crate::device::{Device, DeviceError};
use crate::engine::requests::LiveRequest;
use crate::model::{Batch, BatchSpan};
use crate::sampling::{SampleError, Sampled, SamplerScratch, log_sum_exp, logprob};
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
        let rows: Vec<OnceLock<Row>> = wanted.iter().map(|_| OnceLock::new()).collect();
        let (requests, sequences, scratches) = (&self.requests, &self.sequences, &self.scratches);
        let parts = Arc::clone(&self.parts);
        parts.transformer.forward(
            &*parts.device,
            weights,
            &mut self.kv,
            &mut self.workspace,
            batch,
            &|index, logits| {
                let row = match wanted[index] {
                    Wanted::Prompt { request, position } => {
                        let token = requests[&request].prompt()[position];
                        let logprob = logprob(logits, log_sum_exp(logits), token);
                        Row::Prompt { request, position, logprob }
                    }
                    Wanted::Next { seq } => {
                        let (request, sample) = sequences[&seq];
                        let request = &requests[&request];
                        let samples = sample_next(request, sample, logits, &*parts.device, scratches);
                        Row::Next { seq, samples }
                    }
                };
                assert!(rows[index].set(row).is_ok(), "each row's logits come once");
            },
        )?;
        Ok(rows.into_iter().map(|row| row.into_inner().expect("each row's logits came")).collect())
    }
}

/// Draws the next token of `sample`, or of all samples if they are to be forked from it; none for a request
/// that only scores its prompt.
fn sample_next(
    request: &LiveRequest,
    sample: usize,
    logits: &[f32],
    device: &dyn Device,
    scratches: &Mutex<Vec<SamplerScratch>>,
) -> Vec<(usize, Result<Sampled, SampleError>)> {
    if request.request.params.max_new_tokens == 0 || request.samples[sample].ended {
        return Vec::new();
    }
    let all_start = sample == 0 && request.samples.iter().all(|s| !s.ended && s.completion.tokens.is_empty());
    let drawn = if all_start { 0..request.samples.len() } else { sample..sample + 1 };
    let results: Vec<OnceLock<_>> = drawn.clone().map(|_| OnceLock::new()).collect();
    device.share_out(results.len(), &|at| {
        let live = &request.samples[drawn.start + at];
        let mut scratch = scratches.lock().pop().unwrap_or_default();
        let sampled = live.sampler().sample(logits, live.completion.tokens.len(), &mut scratch);
        scratches.lock().push(scratch);
        assert!(results[at].set(sampled).is_ok(), "each sample is drawn once");
    });
    drawn.zip(results.into_iter().map(|result| result.into_inner().expect("each sample was drawn"))).collect()
}
