//! The CPU device.
//!
//! All kernels are written once over sixteen lanes ([`simd`]) and give the same bits on every instruction
//! set, with any number of threads and whatever else is in the batch. They are also the reference that other
//! devices are compared with.
//!
//! Arithmetic assumes the default floating-point environment (round to nearest, no flush to zero) on the
//! calling threads.

mod attention;
mod budget;
mod chain;
mod host;
mod host_buffer;
mod kv;
mod math;
mod matmul;
mod memory;
mod packed;
mod pool;
mod rows;
mod simd;
#[cfg(test)]
pub(in crate::device) mod tests;
mod transpose;

use std::ops::Range;
use std::sync::Arc;

pub(crate) use budget::Budget;
pub(super) use budget::system_available_bytes;
#[cfg(feature = "cuda")]
pub(crate) use host_buffer::Home;
pub(crate) use host_buffer::HostBuffer;
#[cfg(test)]
pub(crate) use host_buffer::REFUSE_NEXT;
pub(crate) use math::{log_of_sum, log_sum_exp};
pub use simd::SimdPath;

use self::host::{slice, slice_mut, widen};
use super::{
    Arena, AttentionScores, Device, DeviceError, HeadShape, KvLayer, KvLayerMut, Matrix, MatrixShape, Output,
    QkNorm, Step, Vector, View, ViewMut,
};

/// What a [`CpuDevice`] may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CpuOptions {
    /// Threads that work on an operation, the calling one included; at least 1.
    pub(crate) threads: usize,
    /// Which instruction set.
    pub(crate) simd: SimdPath,
    /// Most bytes committed by all arenas together; the system's memory if `None`.
    pub(crate) memory_limit_bytes: Option<u64>,
}

/// The host's processor and memory.
#[derive(Debug)]
pub(crate) struct CpuDevice {
    simd: simd::Simd,
    pool: pool::Pool,
    budget: Arc<Budget>,
    scratches: attention::Scratches,
}

impl CpuDevice {
    /// Starts the worker threads.
    ///
    /// # Errors
    /// [`DeviceError::Thread`]; nothing is left running.
    pub(crate) fn new(options: CpuOptions) -> Result<Self, DeviceError> {
        assert!(options.threads > 0, "work needs a thread");
        Ok(Self {
            simd: simd::Simd::detect(options.simd),
            pool: pool::Pool::new(options.threads)?,
            budget: Arc::new(Budget::new(options.memory_limit_bytes)),
            scratches: attention::Scratches::default(),
        })
    }

    /// The instruction set in use: `avx512`, `avx2` or `portable`.
    #[cfg(test)]
    pub(crate) fn simd_name(&self) -> &'static str {
        self.simd.name()
    }

    /// The memory account, also the place to inject faults.
    #[cfg(test)]
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    fn on(&self) -> (simd::Simd, &pool::Pool) {
        (self.simd, &self.pool)
    }
}

impl Device for CpuDevice {
    fn reserve(&self, label: &'static str, bytes: usize) -> Result<Arena, DeviceError> {
        let pages = memory::CpuPages::reserve(label, bytes, &self.budget)?;
        Ok(Arena::new(Box::new(pages), bytes))
    }

    fn matrix_bytes(&self, shape: MatrixShape) -> usize {
        packed::packed_bytes(shape)
    }

    fn packed_rows(&self) -> usize {
        simd::LANES
    }

    fn write_rows(
        &self,
        dst: ViewMut<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        src: &[u8],
    ) -> Result<(), DeviceError> {
        packed::write(&self.pool, slice_mut(dst), shape, first_row, src);
        Ok(())
    }

    fn read_rows(
        &self,
        src: View<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        packed::read(&self.pool, slice(&src), shape, first_row, out);
        Ok(())
    }

    fn copy_bytes(&self, dst: ViewMut<'_, u8>, src: View<'_, u8>) -> Result<(), DeviceError> {
        host::copy(&self.pool, slice(&src), slice_mut(dst));
        Ok(())
    }

    fn write_bytes(&self, dst: ViewMut<'_, u8>, src: &[u8]) -> Result<(), DeviceError> {
        host::copy(&self.pool, src, slice_mut(dst));
        Ok(())
    }

    fn read_bytes(&self, src: View<'_, u8>, out: &mut [u8]) -> Result<(), DeviceError> {
        host::copy(&self.pool, slice(&src), out);
        Ok(())
    }

    fn embed(&self, step: &Step<'_>, table: Matrix<'_>, out: ViewMut<'_, f32>) -> Result<(), DeviceError> {
        let tokens = step.inputs.tokens;
        let (packed, shape, out) = (slice(&table.bytes), table.shape, slice_mut(out));
        assert_eq!(packed.len(), packed::packed_bytes(shape), "the packed table has the size of its shape");
        assert_eq!(out.len(), tokens.len() * shape.cols, "a row for each token");
        assert!(tokens.iter().all(|&token| (token as usize) < shape.rows), "tokens are in the vocabulary");
        rows::fill_rows(&self.pool, out, shape.cols, &|row, out| {
            packed::widen_row(packed, shape, tokens[row] as usize, out);
        });
        Ok(())
    }

    fn rms_norm(
        &self,
        x: View<'_, f32>,
        weight: Vector<'_>,
        eps: f32,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        rows::rms_norm(self.on(), slice(&x), weight.len, &widen(&weight), eps, slice_mut(out));
        Ok(())
    }

    fn matmul(
        &self,
        _step: &mut Step<'_>,
        x: View<'_, f32>,
        w: Matrix<'_>,
        bias: Option<Vector<'_>>,
        output: Output,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        let MatrixShape { rows, cols, dtype } = w.shape;
        assert!(bias.is_none_or(|bias| bias.len == rows), "a bias for each output column");
        let bias = bias.as_ref().map(widen);
        let add = output == Output::Add;
        let (x, weights, out) = (slice(&x), slice(&w.bytes), slice_mut(out));
        let product = matmul::Product::new(x, cols, weights, dtype, rows, bias.as_deref(), add, out);
        product.compute(self.simd, &self.pool);
        Ok(())
    }

    fn rope(
        &self,
        step: &Step<'_>,
        qkv: ViewMut<'_, f32>,
        shape: HeadShape,
        norm: Option<QkNorm<'_>>,
    ) -> Result<(), DeviceError> {
        let norms = norm.map(|norm| {
            assert_eq!((norm.q.len, norm.k.len), (shape.head_dim, shape.head_dim), "norms are of head_dim");
            rows::HeadNorms { q: widen(&norm.q), k: widen(&norm.k), eps: norm.eps }
        });
        let angles = step.inputs.angles;
        rows::rope(self.on(), slice_mut(qkv), shape, norms.as_ref(), angles.cos, angles.sin);
        Ok(())
    }

    fn store_kv(
        &self,
        step: &Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        cache: KvLayerMut<'_>,
    ) -> Result<(), DeviceError> {
        let layer = (slice_mut(cache.keys), slice_mut(cache.values), cache.shape);
        kv::store(&self.pool, slice(&qkv), shape, step.inputs.slots, layer);
        Ok(())
    }

    fn attention(
        &self,
        step: &mut Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        scores: AttentionScores,
        cache: KvLayer<'_>,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        assert_eq!(step.inputs.heads, shape, "the step's heads");
        let layer = (slice(&cache.keys), slice(&cache.values), cache.shape);
        let batch = attention::Batch { spans: step.inputs.spans, scores };
        let call = attention::Attention::new(slice(&qkv), shape, batch, layer, slice_mut(out));
        call.compute(self.simd, &self.pool, &self.scratches);
        Ok(())
    }

    fn silu_mul(
        &self,
        gate_up: View<'_, f32>,
        width: usize,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        rows::silu_mul(self.on(), slice(&gate_up), width, slice_mut(out));
        Ok(())
    }

    fn gather_rows(
        &self,
        step: &Step<'_>,
        x: View<'_, f32>,
        dim: usize,
        wanted: Range<usize>,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        let rows = &step.inputs.logit_rows[wanted];
        let (x, out) = (slice(&x), slice_mut(out));
        assert_eq!(out.len(), rows.len() * dim, "a row for each index");
        rows::fill_rows(&self.pool, out, dim, &|row, out| {
            out.copy_from_slice(&x[rows[row] as usize * dim..][..dim]);
        });
        Ok(())
    }

    fn copy_blocks(&self, step: &Step<'_>, cache: KvLayerMut<'_>) -> Result<(), DeviceError> {
        kv::copy_blocks((slice_mut(cache.keys), slice_mut(cache.values), cache.shape), step.inputs.copies);
        Ok(())
    }

    fn with_host(&self, view: View<'_, f32>, f: &mut dyn FnMut(&[f32])) -> Result<(), DeviceError> {
        f(slice(&view));
        Ok(())
    }

    fn share_out(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        self.pool.for_each(count, work);
    }
}
