//! One decoder-only transformer for all supported families, read from top to bottom.
//!
//! Source: Vaswani et al. 2017 with pre-norm (RMS norm), rotary embeddings, grouped-query attention and a
//! gated MLP: Touvron et al. 2023 (LLaMA), Jiang et al. 2023 (Mistral 7B), Yang et al. 2024 (Qwen2: bias on
//! q, k, v), Yang et al. 2025 (Qwen3: norms on the heads of q and k).

use std::sync::Arc;

use super::memory::Buffers;
use super::{KvMemory, ModelConfig, Workspace};
use crate::device::{
    AttentionScores, AttentionSpan, Device, DeviceError, HeadShape, LogitsReader, Output, Recorder,
    RopeAngles, Step, StepInputs,
};
use crate::weights::ResidentWeights;

/// The tokens of one step, sequence after sequence.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// `[rows]`.
    pub(crate) tokens: Vec<u32>,
    /// `[rows]`: position of each token in its sequence.
    pub(crate) positions: Vec<u32>,
    /// `[rows]`: cache slot of each token.
    pub(crate) slots: Vec<u32>,
    /// Which rows belong to which sequence.
    pub(crate) spans: Vec<BatchSpan>,
    /// Rows whose logits are wanted, ascending.
    pub(crate) logit_rows: Vec<u32>,
    /// Blocks to copy before anything else: `(from, to)`.
    pub(crate) copies: Vec<(u32, u32)>,
}

/// Consecutive rows of one sequence.
#[derive(Debug)]
pub(crate) struct BatchSpan {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) first_position: usize,
    pub(crate) block_table: Vec<u32>,
}

/// The forward pass.
#[derive(Debug)]
pub(crate) struct Transformer {
    config: Arc<ModelConfig>,
    heads: HeadShape,
    /// Rotations per position of each pair of a head, radians; `[head_dim / 2]`.
    inv_freq: Vec<f32>,
    /// Multiplies cosines and sines (YaRN's attention factor; 1 elsewhere).
    rope_scale: f32,
    recorder: Box<dyn Recorder>,
}

impl Transformer {
    /// Of an engine on this device.
    pub(crate) fn new(device: &dyn Device, config: Arc<ModelConfig>) -> Self {
        let (inv_freq, rope_scale) = config.rope_inv_freq();
        Self { heads: config.heads(), inv_freq, rope_scale, recorder: device.recorder(), config }
    }

    /// Runs a step: writes the batch's keys and values into `kv` and has `reader` take in the logits of each of
    /// `batch.logit_rows`, by its index there.
    ///
    /// # Errors
    /// The device's; the slots of this batch are then unspecified, all others untouched.
    pub(crate) fn forward(
        &self,
        device: &dyn Device,
        weights: &ResidentWeights,
        kv: &mut KvMemory,
        workspace: &mut Workspace,
        batch: &Batch,
        reader: &dyn LogitsReader,
    ) -> Result<(), DeviceError> {
        let (cos, sin) = self.angles(&batch.positions);
        let spans: Vec<AttentionSpan<'_>> = batch.spans.iter().map(BatchSpan::as_attention).collect();
        let inputs = StepInputs {
            tokens: &batch.tokens,
            slots: &batch.slots,
            heads: self.heads,
            angles: RopeAngles { cos: &cos, sin: &sin },
            spans: &spans,
            logit_rows: &batch.logit_rows,
            copies: &batch.copies,
        };
        let logit_rows = workspace.logit_rows();
        let (mut buffers, memory, scratch) = workspace.buffers();
        let mut step = Step { inputs, memory, scratch };
        device.begin_step(&mut step)?;
        self.recorder.run(&mut step, &mut |step| {
            let hidden = buffers.hidden.slice(0, batch.tokens.len() * self.config.hidden_size);
            device.embed(step, weights.embedding(), hidden)?;
            for layer in 0..self.config.num_layers {
                if !batch.copies.is_empty() {
                    device.copy_blocks(step, kv.layer_mut(layer))?;
                }
                self.attention(device, weights, kv, &mut buffers, step, layer)?;
                self.mlp(device, weights, &mut buffers, step, layer)?;
            }
            Ok(())
        })?;
        self.logits(device, weights, &mut buffers, &mut step, logit_rows, reader)
    }

    /// `hidden += o(attention(rope(qkv(norm(hidden)))))`
    fn attention(
        &self,
        device: &dyn Device,
        weights: &ResidentWeights,
        kv: &mut KvMemory,
        buffers: &mut Buffers<'_>,
        step: &mut Step<'_>,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let rows = step.inputs.tokens.len();
        let layer_weights = weights.layer(layer, self.config.rms_norm_eps);
        let mut hidden = buffers.hidden.slice(0, rows * self.config.hidden_size);
        let mut normed = buffers.normed.slice(0, rows * self.config.hidden_size);
        let mut qkv = buffers.qkv.slice(0, rows * self.heads.width());
        let mut out = buffers.attention.slice(0, rows * self.heads.q_width());

        let eps = self.config.rms_norm_eps;
        device.rms_norm(hidden.as_view(), layer_weights.input_norm, eps, normed.slice(0, normed.len()))?;
        device.matmul(
            step,
            normed.as_view(),
            layer_weights.qkv,
            layer_weights.qkv_bias,
            Output::Store,
            qkv.slice(0, qkv.len()),
        )?;
        device.rope(step, qkv.slice(0, qkv.len()), self.heads, layer_weights.qk_norm)?;
        device.store_kv(step, qkv.as_view(), self.heads, kv.layer_mut(layer))?;
        let scores = AttentionScores {
            scale: 1.0 / (self.heads.head_dim as f32).sqrt(),
            window: self.config.sliding_windows[layer],
        };
        let whole = out.len();
        device.attention(step, qkv.as_view(), self.heads, scores, kv.layer(layer), out.slice(0, whole))?;
        device.matmul(
            step,
            out.as_view(),
            layer_weights.o,
            layer_weights.o_bias,
            Output::Add,
            hidden.slice(0, hidden.len()),
        )
    }

    /// `hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))`
    fn mlp(
        &self,
        device: &dyn Device,
        weights: &ResidentWeights,
        buffers: &mut Buffers<'_>,
        step: &mut Step<'_>,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let rows = step.inputs.tokens.len();
        let width = self.config.intermediate_size;
        let eps = self.config.rms_norm_eps;
        let layer = weights.layer(layer, eps);
        let mut hidden = buffers.hidden.slice(0, rows * self.config.hidden_size);
        let mut normed = buffers.normed.slice(0, rows * self.config.hidden_size);
        let mut gate_up = buffers.gate_up.slice(0, rows * 2 * width);
        let mut activated = buffers.activated.slice(0, rows * width);

        device.rms_norm(hidden.as_view(), layer.post_norm, eps, normed.slice(0, normed.len()))?;
        device.matmul(
            step,
            normed.as_view(),
            layer.gate_up,
            layer.gate_up_bias,
            Output::Store,
            gate_up.slice(0, gate_up.len()),
        )?;
        device.silu_mul(gate_up.as_view(), width, activated.slice(0, activated.len()))?;
        device.matmul(
            step,
            activated.as_view(),
            layer.down,
            layer.down_bias,
            Output::Add,
            hidden.slice(0, hidden.len()),
        )
    }

    /// Norm and head of the wanted rows only, a few at a time: logits are the largest activation.
    fn logits(
        &self,
        device: &dyn Device,
        weights: &ResidentWeights,
        buffers: &mut Buffers<'_>,
        step: &mut Step<'_>,
        rows_at_a_time: usize,
        reader: &dyn LogitsReader,
    ) -> Result<(), DeviceError> {
        let (dim, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let hidden = buffers.hidden.as_view().slice(0, step.inputs.tokens.len() * dim);
        let wanted = step.inputs.logit_rows.len();
        for first in (0..wanted).step_by(rows_at_a_time) {
            let rows = rows_at_a_time.min(wanted - first);
            let mut last = buffers.last.slice(0, rows * dim);
            let mut normed = buffers.normed.slice(0, rows * dim);
            let mut logits = buffers.logits.slice(0, rows * vocab);
            device.gather_rows(step, hidden, dim, first..first + rows, last.slice(0, last.len()))?;
            let eps = self.config.rms_norm_eps;
            device.rms_norm(last.as_view(), weights.final_norm(), eps, normed.slice(0, normed.len()))?;
            let whole = logits.len();
            device.matmul(
                step,
                normed.as_view(),
                weights.head(),
                None,
                Output::Store,
                logits.slice(0, whole),
            )?;
            device.read_logits(step, logits, vocab, first, reader)?;
        }
        Ok(())
    }

    /// Cosines and sines of each row, `[rows, head_dim / 2]`. Computed for the step instead of kept in a
    /// table: nothing to rebuild after a wake, and nothing that a long context makes large.
    fn angles(&self, positions: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let angle = |(position, inv_freq): (u32, &f32)| {
            // The product is rounded to f32 first, as in the reference implementation.
            let (sin, cos) = f64::from(position as f32 * inv_freq).sin_cos();
            (cos as f32 * self.rope_scale, sin as f32 * self.rope_scale)
        };
        positions.iter().flat_map(|&p| self.inv_freq.iter().map(move |f| (p, f))).map(angle).unzip()
    }
}

impl BatchSpan {
    fn as_attention(&self) -> AttentionSpan<'_> {
        AttentionSpan {
            first_row: self.first_row,
            rows: self.rows,
            first_position: self.first_position,
            block_table: &self.block_table,
        }
    }
}
