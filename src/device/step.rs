//! What the operations of one step have in common.

use super::{AttentionSpan, DeviceError, HeadShape, RopeAngles, ViewMut};

/// What a step works on, as the caller has it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StepInputs<'a> {
    /// `[rows]`.
    pub(crate) tokens: &'a [u32],
    /// `[rows]`: cache slot of each row, `block * block_size + offset`.
    pub(crate) slots: &'a [u32],
    /// The model's heads.
    pub(crate) heads: HeadShape,
    /// Of each row.
    pub(crate) angles: RopeAngles<'a>,
    /// Which rows belong to which sequence, and its blocks.
    pub(crate) spans: &'a [AttentionSpan<'a>],
    /// Rows whose logits are wanted.
    pub(crate) logit_rows: &'a [u32],
    /// Blocks to copy before anything else, `(from, to)`, in order.
    pub(crate) copies: &'a [(u32, u32)],
}

/// The most that steps can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepLimits {
    /// Rows, tokens of all sequences together.
    pub(crate) rows: usize,
    /// Sequences.
    pub(crate) spans: usize,
    /// Tokens of a sequence.
    pub(crate) positions: usize,
    /// Positions of a block.
    pub(crate) block_size: usize,
    pub(crate) heads: HeadShape,
    /// Input features of the widest matrix.
    pub(crate) widest: usize,
}

impl StepLimits {
    /// Blocks of a sequence.
    #[cfg(feature = "cuda")]
    pub(crate) fn table_blocks(&self) -> usize {
        self.positions.div_ceil(self.block_size)
    }
}

/// Device memory that a step takes beside the activations, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct StepBytes {
    pub(crate) inputs: usize,
    pub(crate) scratch: usize,
}

/// A step in progress: its inputs, and memory for them and for what operations need in passing. Both are aligned to
/// 256 bytes, lie at the same addresses in all steps of an engine, and have the size that
/// [`Device::step_bytes`](super::Device::step_bytes) gave.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU device needs no memory of a step"))]
pub(crate) struct Step<'a> {
    pub(crate) inputs: StepInputs<'a>,
    pub(crate) memory: ViewMut<'a, u8>,
    pub(crate) scratch: ViewMut<'a, u8>,
}

/// Runs the operations of steps of one model in one engine: weights, caches and activations are at the same addresses
/// in all of them.
pub(crate) trait Recorder: Send + Sync + std::fmt::Debug {
    /// Has the device do what `work` puts on it, after [`Device::begin_step`](super::Device::begin_step). `work` may
    /// not be called, if it was for an earlier step of the same shape.
    fn run(
        &self,
        step: &mut Step<'_>,
        work: &mut dyn FnMut(&mut Step<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError>;
}

/// Repeats nothing.
#[derive(Debug)]
pub(crate) struct Unrecorded;

impl Recorder for Unrecorded {
    fn run(
        &self,
        step: &mut Step<'_>,
        work: &mut dyn FnMut(&mut Step<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        work(step)
    }
}
