//! A device, of whatever kind, with plain vectors going in and out, and numbers to feed it.

use crate::device::cpu::{CpuDevice, CpuOptions, SimdPath};
use crate::device::{
    Arena, AttentionScores, AttentionSpan, Device, HeadShape, KvLayer, KvLayerMut, KvShape, Matrix,
    MatrixShape, Output, QkNorm, RopeAngles, Step, StepInputs, StepLimits, Vector,
};
use crate::weights::DType;

/// Every instruction set of this machine, with one thread and with several.
pub(super) fn devices() -> Vec<CpuDevice> {
    let mut devices = Vec::new();
    for simd in [SimdPath::Auto, SimdPath::Avx2, SimdPath::Portable] {
        for threads in [1, 3] {
            devices.push(device(threads, simd));
        }
    }
    devices
}

pub(in crate::device) fn device(threads: usize, simd: SimdPath) -> CpuDevice {
    CpuDevice::new(CpuOptions { threads, simd, memory_limit_bytes: None }).unwrap()
}

/// Numbers that look random and depend on the seed only.
pub(in crate::device) struct Noise(u64);

impl Noise {
    pub(in crate::device) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(in crate::device) fn next_u64(&mut self) -> u64 {
        // xorshift64*: Vigna 2016.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In -1..1.
    pub(in crate::device) fn f32(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(in crate::device) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.f32()).collect()
    }

    pub(in crate::device) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next_u64() as u8).collect()
    }
}

pub(in crate::device) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The elements in `dtype`, as bytes.
pub(in crate::device) fn encode(dtype: DType, x: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => x.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
        DType::Bf16 => x.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// The elements after rounding to `dtype`.
pub(in crate::device) fn rounded(dtype: DType, x: &[f32]) -> Vec<f32> {
    match dtype {
        DType::F32 => x.to_vec(),
        DType::F16 => x.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect(),
        DType::Bf16 => x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect(),
    }
}

pub(in crate::device) fn assert_close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs() / expected.abs().max(1.0);
        assert!(error <= tolerance, "{what}[{i}]: {got} for {expected}, error {error:e}");
    }
}

pub(in crate::device) fn bytes_arena(device: &dyn Device, bytes: &[u8]) -> Arena {
    let mut arena = device.reserve("test", bytes.len()).unwrap();
    arena.commit(bytes.len()).unwrap();
    device.write_bytes(arena.view_mut(0, bytes.len()), bytes).unwrap();
    arena
}

pub(in crate::device) fn f32_arena(device: &dyn Device, x: &[f32]) -> Arena {
    bytes_arena(device, &encode(DType::F32, x))
}

pub(in crate::device) fn read_f32(device: &dyn Device, arena: &Arena, len: usize) -> Vec<f32> {
    let mut out = Vec::new();
    device.with_host(arena.view(0, len), &mut |x| out.extend_from_slice(x)).unwrap();
    out
}

pub(in crate::device) fn packed_arena(device: &dyn Device, shape: MatrixShape, rows: &[u8]) -> Arena {
    let bytes = device.matrix_bytes(shape);
    let mut arena = device.reserve("matrix", bytes).unwrap();
    arena.commit(bytes).unwrap();
    device.write_rows(arena.view_mut(0, bytes), shape, 0, rows).unwrap();
    arena
}

pub(in crate::device) fn matrix(arena: &Arena, shape: MatrixShape) -> Matrix<'_> {
    Matrix { bytes: arena.view(0, arena.committed()), shape }
}

pub(in crate::device) fn vector(arena: &Arena, dtype: DType) -> Vector<'_> {
    let bytes = arena.view(0, arena.committed());
    Vector { bytes, len: arena.committed() / dtype.size(), dtype }
}

/// Runs operations of a step with these inputs.
pub(in crate::device) fn with_step(
    device: &dyn Device,
    inputs: StepInputs<'_>,
    run: impl FnOnce(&mut Step<'_>),
) {
    with_step_of(device, inputs, (0, 0), run);
}

/// [`with_step`], with room for products of so many rows and input features.
fn with_step_of(
    device: &dyn Device,
    inputs: StepInputs<'_>,
    (rows, widest): (usize, usize),
    run: impl FnOnce(&mut Step<'_>),
) {
    let spans = inputs.spans.iter();
    let span_rows: usize = spans.clone().map(|span| span.rows).sum();
    let longest =
        spans.map(|span| span.block_table.len().max(span.first_position + span.rows)).max().unwrap_or(0);
    let angles = inputs.angles.cos.len();
    let counts = [rows, span_rows, angles, inputs.tokens.len(), inputs.slots.len(), inputs.logit_rows.len()];
    let limits = StepLimits {
        rows: counts.into_iter().max().unwrap_or(0),
        spans: inputs.spans.len().max(inputs.copies.len()),
        positions: longest,
        block_size: 1,
        // An angle for each row at least.
        heads: HeadShape { head_dim: inputs.heads.head_dim.max(2), ..inputs.heads },
        widest,
    };
    let bytes = device.step_bytes(&limits);
    let whole = bytes.inputs.next_multiple_of(256) + bytes.scratch;
    let mut arena = device.reserve("step", whole).unwrap();
    arena.commit(whole).unwrap();
    let (memory, scratch) = arena.view_mut(0, whole).split_at(bytes.inputs.next_multiple_of(256));
    let mut step = Step { inputs, memory, scratch };
    device.begin_step(&mut step).unwrap();
    run(&mut step);
}

/// `x · wᵀ`, with a bias and added to `start` if they are given.
pub(in crate::device) fn matmul(
    device: &dyn Device,
    x: &[f32],
    w: Matrix<'_>,
    bias: Option<&[f32]>,
    start: Option<&[f32]>,
) -> Vec<f32> {
    matmul_biased(device, x, w, bias.map(|bias| (bias, DType::F32)), start)
}

/// [`matmul`] with a bias in some dtype.
pub(in crate::device) fn matmul_biased(
    device: &dyn Device,
    x: &[f32],
    w: Matrix<'_>,
    bias: Option<(&[f32], DType)>,
    start: Option<&[f32]>,
) -> Vec<f32> {
    let len = x.len() / w.shape.cols * w.shape.rows;
    let x = f32_arena(device, x);
    let mut out = f32_arena(device, start.unwrap_or(&vec![f32::NAN; len]));
    let bias = bias.map(|(bias, dtype)| (bytes_arena(device, &encode(dtype, bias)), dtype));
    let output = if start.is_some() { Output::Add } else { Output::Store };
    let x = x.view(0, x.committed() / 4);
    let bias = bias.as_ref().map(|(bias, dtype)| vector(bias, *dtype));
    let product = (len / w.shape.rows, w.shape.cols);
    with_step_of(device, StepInputs::default(), product, |step| {
        device.matmul(step, x, w, bias, output, out.view_mut(0, len)).unwrap();
    });
    read_f32(device, &out, len)
}

pub(in crate::device) fn rms_norm(
    device: &dyn Device,
    x: &[f32],
    weight: &[f32],
    dtype: DType,
    eps: f32,
) -> Vec<f32> {
    let (input, weight) = (f32_arena(device, x), bytes_arena(device, &encode(dtype, weight)));
    let mut out = f32_arena(device, &vec![f32::NAN; x.len()]);
    let view = input.view(0, x.len());
    device.rms_norm(view, vector(&weight, dtype), eps, out.view_mut(0, x.len())).unwrap();
    read_f32(device, &out, x.len())
}

pub(in crate::device) fn silu_mul(device: &dyn Device, gate_up: &[f32], width: usize) -> Vec<f32> {
    let input = f32_arena(device, gate_up);
    let len = gate_up.len() / 2;
    let mut out = f32_arena(device, &vec![f32::NAN; len]);
    device.silu_mul(input.view(0, gate_up.len()), width, out.view_mut(0, len)).unwrap();
    read_f32(device, &out, len)
}

pub(in crate::device) fn rope(
    device: &dyn Device,
    qkv: &[f32],
    shape: HeadShape,
    norms: Option<(&[f32], &[f32], f32)>,
    angles: (&[f32], &[f32]),
) -> Vec<f32> {
    rope_normed(device, qkv, shape, norms.map(|norms| (norms, [DType::F32; 2])), angles)
}

/// Weights of queries and keys, and epsilon.
pub(in crate::device) type Norms<'a> = (&'a [f32], &'a [f32], f32);

/// [`rope`] with norms in some dtypes.
pub(in crate::device) fn rope_normed(
    device: &dyn Device,
    qkv: &[f32],
    shape: HeadShape,
    norms: Option<(Norms<'_>, [DType; 2])>,
    (cos, sin): (&[f32], &[f32]),
) -> Vec<f32> {
    let mut arena = f32_arena(device, qkv);
    let norms = norms.map(|((q, k, eps), dtypes)| {
        let [q, k] = [(q, dtypes[0]), (k, dtypes[1])].map(|(x, d)| bytes_arena(device, &encode(d, x)));
        (q, k, eps, dtypes)
    });
    let norm = norms.as_ref().map(|(q, k, eps, dtypes)| QkNorm {
        q: vector(q, dtypes[0]),
        k: vector(k, dtypes[1]),
        eps: *eps,
    });
    let inputs = StepInputs { angles: RopeAngles { cos, sin }, ..StepInputs::default() };
    with_step(device, inputs, |step| {
        device.rope(step, arena.view_mut(0, qkv.len()), shape, norm).unwrap();
    });
    read_f32(device, &arena, qkv.len())
}

/// One layer's cache.
pub(in crate::device) struct Cache {
    pub(in crate::device) keys: Arena,
    pub(in crate::device) values: Arena,
    pub(in crate::device) shape: KvShape,
}

impl Cache {
    /// Filled with NaNs, which must not come out again.
    pub(in crate::device) fn new(device: &dyn Device, shape: KvShape) -> Self {
        let nans = vec![f32::NAN; shape.layer_elements()];
        Self { keys: f32_arena(device, &nans), values: f32_arena(device, &nans), shape }
    }

    pub(in crate::device) fn store(
        &mut self,
        device: &dyn Device,
        heads: HeadShape,
        qkv: &[f32],
        slots: &[u32],
    ) {
        let qkv = f32_arena(device, qkv);
        let qkv = qkv.view(0, slots.len() * heads.width());
        with_step(device, StepInputs { slots, ..StepInputs::default() }, |step| {
            device.store_kv(step, qkv, heads, self.layer_mut()).unwrap();
        });
    }

    pub(in crate::device) fn layer(&self) -> KvLayer<'_> {
        let len = self.shape.layer_elements();
        KvLayer { keys: self.keys.view(0, len), values: self.values.view(0, len), shape: self.shape }
    }

    pub(in crate::device) fn layer_mut(&mut self) -> KvLayerMut<'_> {
        let len = self.shape.layer_elements();
        KvLayerMut {
            keys: self.keys.view_mut(0, len),
            values: self.values.view_mut(0, len),
            shape: self.shape,
        }
    }
}

pub(in crate::device) fn attention(
    device: &dyn Device,
    heads: HeadShape,
    qkv: &[f32],
    spans: &[AttentionSpan<'_>],
    window: Option<usize>,
    cache: &Cache,
) -> Vec<f32> {
    let input = f32_arena(device, qkv);
    let len = qkv.len() / heads.width() * heads.q_width();
    let mut out = f32_arena(device, &vec![f32::NAN; len]);
    let scores = AttentionScores { scale: 1.0 / (heads.head_dim as f32).sqrt(), window };
    let view = input.view(0, qkv.len());
    with_step(device, StepInputs { spans, heads, ..StepInputs::default() }, |step| {
        device.attention(step, view, heads, scores, cache.layer(), out.view_mut(0, len)).unwrap();
    });
    read_f32(device, &out, len)
}
