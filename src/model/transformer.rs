//! One decoder-only transformer for all supported families, read from top to bottom.
//!
//! Source: Vaswani et al. 2017 with pre-norm (RMS norm), rotary embeddings, grouped-query attention and a
//! gated MLP: Touvron et al. 2023 (LLaMA), Jiang et al. 2023 (Mistral 7B), Yang et al. 2024 (Qwen2: bias on
//! q, k, v), Yang et al. 2025 (Qwen3: norms on the heads of q and k).

use std::sync::Arc;

use super::memory::Buffers;
use super::{KvMemory, ModelConfig, Workspace};
use crate::device::{
    AttentionBatch, AttentionSpan, Device, DeviceError, HeadShape, Output, RopeAngles, View,
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
}

impl Transformer {
    pub(crate) fn new(config: Arc<ModelConfig>) -> Self {
        let (inv_freq, rope_scale) = config.rope_inv_freq();
        Self { heads: config.heads(), inv_freq, rope_scale, config }
    }

    /// Runs a step: writes the batch's keys and values into `kv` and hands the logits of each of
    /// `batch.logit_rows`, by its index there, to `on_logits`, on several threads at once.
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
        on_logits: &(dyn Fn(usize, &[f32]) + Sync),
    ) -> Result<(), DeviceError> {
        let (cos, sin) = self.angles(&batch.positions);
        let angles = RopeAngles { cos: &cos, sin: &sin };
        let logit_rows = workspace.logit_rows();
        let mut buffers = workspace.buffers();
        let hidden = buffers.hidden.slice(0, batch.tokens.len() * self.config.hidden_size);
        device.embed(weights.embedding(), &batch.tokens, hidden)?;
        for layer in 0..self.config.num_layers {
            if !batch.copies.is_empty() {
                device.copy_blocks(kv.layer_mut(layer), &batch.copies)?;
            }
            self.attention(device, weights, kv, &mut buffers, batch, angles, layer)?;
            self.mlp(device, weights, &mut buffers, batch.tokens.len(), layer)?;
        }
        self.logits(device, weights, &mut buffers, batch, logit_rows, on_logits)
    }

    /// `hidden += o(attention(rope(qkv(norm(hidden)))))`
    #[expect(clippy::too_many_arguments, reason = "the parts of a step, each used once")]
    fn attention(
        &self,
        device: &dyn Device,
        weights: &ResidentWeights,
        kv: &mut KvMemory,
        buffers: &mut Buffers<'_>,
        batch: &Batch,
        angles: RopeAngles<'_>,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let rows = batch.tokens.len();
        let layer_weights = weights.layer(layer, self.config.rms_norm_eps);
        let mut hidden = buffers.hidden.slice(0, rows * self.config.hidden_size);
        let mut normed = buffers.normed.slice(0, rows * self.config.hidden_size);
        let mut qkv = buffers.qkv.slice(0, rows * self.heads.width());
        let mut out = buffers.attention.slice(0, rows * self.heads.q_width());

        let eps = self.config.rms_norm_eps;
        device.rms_norm(hidden.as_view(), layer_weights.input_norm, eps, normed.slice(0, normed.len()))?;
        device.matmul(
            normed.as_view(),
            layer_weights.qkv,
            layer_weights.qkv_bias,
            Output::Store,
            qkv.slice(0, qkv.len()),
        )?;
        device.rope(qkv.slice(0, qkv.len()), self.heads, layer_weights.qk_norm, angles)?;
        device.store_kv(qkv.as_view(), self.heads, &batch.slots, kv.layer_mut(layer))?;
        let spans: Vec<AttentionSpan<'_>> = batch.spans.iter().map(BatchSpan::as_attention).collect();
        let attention = AttentionBatch {
            spans: &spans,
            scale: 1.0 / (self.heads.head_dim as f32).sqrt(),
            window: self.config.sliding_windows[layer],
        };
        device.attention(qkv.as_view(), self.heads, &attention, kv.layer(layer), out.slice(0, out.len()))?;
        device.matmul(
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
        rows: usize,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let width = self.config.intermediate_size;
        let eps = self.config.rms_norm_eps;
        let layer = weights.layer(layer, eps);
        let mut hidden = buffers.hidden.slice(0, rows * self.config.hidden_size);
        let mut normed = buffers.normed.slice(0, rows * self.config.hidden_size);
        let mut gate_up = buffers.gate_up.slice(0, rows * 2 * width);
        let mut activated = buffers.activated.slice(0, rows * width);

        device.rms_norm(hidden.as_view(), layer.post_norm, eps, normed.slice(0, normed.len()))?;
        device.matmul(
            normed.as_view(),
            layer.gate_up,
            layer.gate_up_bias,
            Output::Store,
            gate_up.slice(0, gate_up.len()),
        )?;
        device.silu_mul(gate_up.as_view(), width, activated.slice(0, activated.len()))?;
        device.matmul(
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
        batch: &Batch,
        rows_at_a_time: usize,
        on_logits: &(dyn Fn(usize, &[f32]) + Sync),
    ) -> Result<(), DeviceError> {
        let (dim, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let hidden = buffers.hidden.as_view().slice(0, batch.tokens.len() * dim);
        for (group, rows) in batch.logit_rows.chunks(rows_at_a_time).enumerate() {
            let mut last = buffers.last.slice(0, rows.len() * dim);
            let mut normed = buffers.normed.slice(0, rows.len() * dim);
            let mut logits = buffers.logits.slice(0, rows.len() * vocab);
            device.gather_rows(hidden, dim, rows, last.slice(0, last.len()))?;
            let eps = self.config.rms_norm_eps;
            device.rms_norm(last.as_view(), weights.final_norm(), eps, normed.slice(0, normed.len()))?;
            let whole = logits.len();
            device.matmul(normed.as_view(), weights.head(), None, Output::Store, logits.slice(0, whole))?;
            let logits: View<'_, f32> = logits.as_view();
            device.with_host(logits, &mut |values| {
                device.share_out(rows.len(), &|row| {
                    on_logits(group * rows_at_a_time + row, &values[row * vocab..][..vocab]);
                });
            })?;
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
