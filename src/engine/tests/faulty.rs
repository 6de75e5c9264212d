//! A CPU device whose n-th operation fails or panics.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::cpu;
use crate::device::cpu::{Budget, CpuDevice};
use crate::device::{
    Arena, AttentionScores, Device, DeviceError, HeadShape, KvLayer, KvLayerMut, Matrix, MatrixShape, Output,
    QkNorm, Step, Vector, View, ViewMut,
};

/// Counts what can fail (memory goes through the CPU device's own budget) and what can only panic.
#[derive(Debug)]
pub(super) struct FaultyDevice {
    inner: CpuDevice,
    /// Operations until one fails; 0 when none is to fail.
    fail_in: AtomicU64,
    /// All operations fail.
    fail_all: AtomicBool,
    /// Operations and copies until one panics; 0 when none is to panic.
    panic_in: AtomicU64,
    /// Reservations until one fails.
    reserve_in: AtomicU64,
}

impl FaultyDevice {
    pub(super) fn new() -> Arc<Self> {
        let zero = || AtomicU64::new(0);
        let fail_all = AtomicBool::new(false);
        Arc::new(Self { inner: cpu(), fail_in: zero(), fail_all, panic_in: zero(), reserve_in: zero() })
    }

    pub(super) fn budget(&self) -> &Arc<Budget> {
        self.inner.budget()
    }

    /// Makes the `n`-th operation from now fail; 0 cancels.
    pub(super) fn fail_nth(&self, n: u64) {
        self.fail_in.store(n, Ordering::Relaxed);
    }

    /// Makes all operations from now on fail, or none.
    pub(super) fn fail_all(&self, fail: bool) {
        self.fail_all.store(fail, Ordering::Relaxed);
    }

    /// Makes the `n`-th operation or copy from now panic; 0 cancels.
    pub(super) fn panic_nth(&self, n: u64) {
        self.panic_in.store(n, Ordering::Relaxed);
    }

    /// Makes the `n`-th reservation from now fail; 0 cancels.
    pub(super) fn refuse_nth_reservation(&self, n: u64) {
        self.reserve_in.store(n, Ordering::Relaxed);
    }

    fn may_panic(&self) {
        assert!(!counted_down(&self.panic_in), "an operation that panics");
    }

    fn operation(&self, operation: &'static str) -> Result<(), DeviceError> {
        self.may_panic();
        match self.fail_all.load(Ordering::Relaxed) || counted_down(&self.fail_in) {
            true => Err(DeviceError::Operation { operation, detail: "injected".into() }),
            false => Ok(()),
        }
    }
}

fn counted_down(counter: &AtomicU64) -> bool {
    let count = |left: u64| Some(left.saturating_sub(1));
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count) == Ok(1)
}

impl Device for FaultyDevice {
    fn reserve(&self, label: &'static str, bytes: usize) -> Result<Arena, DeviceError> {
        match counted_down(&self.reserve_in) {
            true => Err(DeviceError::AddressSpace { label, bytes: bytes as u64 }),
            false => self.inner.reserve(label, bytes),
        }
    }

    fn matrix_bytes(&self, shape: MatrixShape) -> usize {
        self.inner.matrix_bytes(shape)
    }

    fn packed_rows(&self) -> usize {
        self.inner.packed_rows()
    }

    fn write_rows(
        &self,
        dst: ViewMut<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        src: &[u8],
    ) -> Result<(), DeviceError> {
        self.may_panic();
        self.inner.write_rows(dst, shape, first_row, src)
    }

    fn read_rows(
        &self,
        src: View<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.may_panic();
        self.inner.read_rows(src, shape, first_row, out)
    }

    fn copy_bytes(&self, dst: ViewMut<'_, u8>, src: View<'_, u8>) -> Result<(), DeviceError> {
        self.may_panic();
        self.inner.copy_bytes(dst, src)
    }

    fn write_bytes(&self, dst: ViewMut<'_, u8>, src: &[u8]) -> Result<(), DeviceError> {
        self.may_panic();
        self.inner.write_bytes(dst, src)
    }

    fn read_bytes(&self, src: View<'_, u8>, out: &mut [u8]) -> Result<(), DeviceError> {
        self.may_panic();
        self.inner.read_bytes(src, out)
    }

    fn embed(&self, step: &Step<'_>, table: Matrix<'_>, out: ViewMut<'_, f32>) -> Result<(), DeviceError> {
        self.operation("embed")?;
        self.inner.embed(step, table, out)
    }

    fn rms_norm(
        &self,
        x: View<'_, f32>,
        weight: Vector<'_>,
        eps: f32,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        self.operation("rms_norm")?;
        self.inner.rms_norm(x, weight, eps, out)
    }

    fn matmul(
        &self,
        step: &mut Step<'_>,
        x: View<'_, f32>,
        w: Matrix<'_>,
        bias: Option<Vector<'_>>,
        output: Output,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        self.operation("matmul")?;
        self.inner.matmul(step, x, w, bias, output, out)
    }

    fn rope(
        &self,
        step: &Step<'_>,
        qkv: ViewMut<'_, f32>,
        shape: HeadShape,
        norm: Option<QkNorm<'_>>,
    ) -> Result<(), DeviceError> {
        self.operation("rope")?;
        self.inner.rope(step, qkv, shape, norm)
    }

    fn store_kv(
        &self,
        step: &Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        cache: KvLayerMut<'_>,
    ) -> Result<(), DeviceError> {
        self.operation("store_kv")?;
        self.inner.store_kv(step, qkv, shape, cache)
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
        self.operation("attention")?;
        self.inner.attention(step, qkv, shape, scores, cache, out)
    }

    fn silu_mul(
        &self,
        gate_up: View<'_, f32>,
        width: usize,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        self.operation("silu_mul")?;
        self.inner.silu_mul(gate_up, width, out)
    }

    fn gather_rows(
        &self,
        step: &Step<'_>,
        x: View<'_, f32>,
        dim: usize,
        wanted: Range<usize>,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        self.operation("gather_rows")?;
        self.inner.gather_rows(step, x, dim, wanted, out)
    }

    fn copy_blocks(&self, step: &Step<'_>, cache: KvLayerMut<'_>) -> Result<(), DeviceError> {
        self.operation("copy_blocks")?;
        self.inner.copy_blocks(step, cache)
    }

    fn share_out(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        self.inner.share_out(count, work);
    }

    fn with_host(&self, view: View<'_, f32>, f: &mut dyn FnMut(&[f32])) -> Result<(), DeviceError> {
        self.operation("with_host")?;
        self.inner.with_host(view, f)
    }
}
