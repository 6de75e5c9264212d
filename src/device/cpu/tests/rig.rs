//! A device with plain vectors going in and out, and numbers to feed it.

use crate::device::cpu::{CpuDevice, CpuOptions, SimdPath};
use crate::device::{
    Arena, AttentionBatch, AttentionSpan, Device, HeadShape, KvLayer, KvLayerMut, KvShape, Matrix,
    MatrixShape, Output, QkNorm, RopeAngles, Vector,
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

pub(super) fn device(threads: usize, simd: SimdPath) -> CpuDevice {
    CpuDevice::new(CpuOptions { threads, simd, memory_limit_bytes: None }).unwrap()
}

/// Numbers that look random and depend on the seed only.
pub(super) struct Noise(u64);

impl Noise {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next_u64(&mut self) -> u64 {
        // xorshift64*: Vigna 2016.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In -1..1.
    pub(super) fn f32(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(super) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.f32()).collect()
    }

    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next_u64() as u8).collect()
    }
}

pub(super) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The elements in `dtype`, as bytes.
pub(super) fn encode(dtype: DType, x: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => x.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
        DType::Bf16 => x.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// The elements after rounding to `dtype`.
pub(super) fn rounded(dtype: DType, x: &[f32]) -> Vec<f32> {
    match dtype {
        DType::F32 => x.to_vec(),
        DType::F16 => x.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect(),
        DType::Bf16 => x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect(),
    }
}

pub(super) fn assert_close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs() / expected.abs().max(1.0);
        assert!(error <= tolerance, "{what}[{i}]: {got} for {expected}, error {error:e}");
    }
}

pub(super) fn bytes_arena(device: &CpuDevice, bytes: &[u8]) -> Arena {
    let mut arena = device.reserve("test", bytes.len()).unwrap();
    arena.commit(bytes.len()).unwrap();
    device.write_bytes(arena.view_mut(0, bytes.len()), bytes);
    arena
}

pub(super) fn f32_arena(device: &CpuDevice, x: &[f32]) -> Arena {
    bytes_arena(device, &encode(DType::F32, x))
}

pub(super) fn read_f32(device: &CpuDevice, arena: &Arena, len: usize) -> Vec<f32> {
    let mut out = Vec::new();
    device.with_host(arena.view(0, len), &mut |x| out.extend_from_slice(x)).unwrap();
    out
}

pub(super) fn packed_arena(device: &CpuDevice, shape: MatrixShape, rows: &[u8]) -> Arena {
    let bytes = device.matrix_bytes(shape);
    let mut arena = device.reserve("matrix", bytes).unwrap();
    arena.commit(bytes).unwrap();
    device.write_rows(arena.view_mut(0, bytes), shape, 0, rows);
    arena
}

pub(super) fn matrix(arena: &Arena, shape: MatrixShape) -> Matrix<'_> {
    Matrix { bytes: arena.view(0, arena.committed()), shape }
}

pub(super) fn vector(arena: &Arena, dtype: DType) -> Vector<'_> {
    let bytes = arena.view(0, arena.committed());
    Vector { bytes, len: arena.committed() / dtype.size(), dtype }
}

/// `x · wᵀ`, with a bias and added to `start` if they are given.
pub(super) fn matmul(
    device: &CpuDevice,
    x: &[f32],
    w: Matrix<'_>,
    bias: Option<&[f32]>,
    start: Option<&[f32]>,
) -> Vec<f32> {
    let len = x.len() / w.shape.cols * w.shape.rows;
    let x = f32_arena(device, x);
    let mut out = f32_arena(device, start.unwrap_or(&vec![f32::NAN; len]));
    let bias = bias.map(|bias| f32_arena(device, bias));
    let output = if start.is_some() { Output::Add } else { Output::Store };
    let x = x.view(0, x.committed() / 4);
    let bias = bias.as_ref().map(|bias| vector(bias, DType::F32));
    device.matmul(x, w, bias, output, out.view_mut(0, len)).unwrap();
    read_f32(device, &out, len)
}

pub(super) fn rms_norm(device: &CpuDevice, x: &[f32], weight: &[f32], dtype: DType, eps: f32) -> Vec<f32> {
    let (input, weight) = (f32_arena(device, x), bytes_arena(device, &encode(dtype, weight)));
    let mut out = f32_arena(device, &vec![f32::NAN; x.len()]);
    let view = input.view(0, x.len());
    device.rms_norm(view, vector(&weight, dtype), eps, out.view_mut(0, x.len())).unwrap();
    read_f32(device, &out, x.len())
}

pub(super) fn silu_mul(device: &CpuDevice, gate_up: &[f32], width: usize) -> Vec<f32> {
    let input = f32_arena(device, gate_up);
    let len = gate_up.len() / 2;
    let mut out = f32_arena(device, &vec![f32::NAN; len]);
    device.silu_mul(input.view(0, gate_up.len()), width, out.view_mut(0, len)).unwrap();
    read_f32(device, &out, len)
}

pub(super) fn rope(
    device: &CpuDevice,
    qkv: &[f32],
    shape: HeadShape,
    norms: Option<(&[f32], &[f32], f32)>,
    (cos, sin): (&[f32], &[f32]),
) -> Vec<f32> {
    let mut arena = f32_arena(device, qkv);
    let norms = norms.map(|(q, k, eps)| (f32_arena(device, q), f32_arena(device, k), eps));
    let norm = norms.as_ref().map(|(q, k, eps)| QkNorm {
        q: vector(q, DType::F32),
        k: vector(k, DType::F32),
        eps: *eps,
    });
    device.rope(arena.view_mut(0, qkv.len()), shape, norm, RopeAngles { cos, sin }).unwrap();
    read_f32(device, &arena, qkv.len())
}

/// One layer's cache.
pub(super) struct Cache {
    pub(super) keys: Arena,
    pub(super) values: Arena,
    pub(super) shape: KvShape,
}

impl Cache {
    /// Filled with NaNs, which must not come out again.
    pub(super) fn new(device: &CpuDevice, shape: KvShape) -> Self {
        let nans = vec![f32::NAN; shape.layer_elements()];
        Self { keys: f32_arena(device, &nans), values: f32_arena(device, &nans), shape }
    }

    pub(super) fn store(&mut self, device: &CpuDevice, heads: HeadShape, qkv: &[f32], slots: &[u32]) {
        let qkv = f32_arena(device, qkv);
        let qkv = qkv.view(0, slots.len() * heads.width());
        device.store_kv(qkv, heads, slots, self.layer_mut()).unwrap();
    }

    pub(super) fn layer(&self) -> KvLayer<'_> {
        let len = self.shape.layer_elements();
        KvLayer { keys: self.keys.view(0, len), values: self.values.view(0, len), shape: self.shape }
    }

    pub(super) fn layer_mut(&mut self) -> KvLayerMut<'_> {
        let len = self.shape.layer_elements();
        KvLayerMut {
            keys: self.keys.view_mut(0, len),
            values: self.values.view_mut(0, len),
            shape: self.shape,
        }
    }
}

pub(super) fn attention(
    device: &CpuDevice,
    heads: HeadShape,
    qkv: &[f32],
    spans: &[AttentionSpan<'_>],
    window: Option<usize>,
    cache: &Cache,
) -> Vec<f32> {
    let input = f32_arena(device, qkv);
    let len = qkv.len() / heads.width() * heads.q_width();
    let mut out = f32_arena(device, &vec![f32::NAN; len]);
    let batch = AttentionBatch { spans, scale: 1.0 / (heads.head_dim as f32).sqrt(), window };
    let view = input.view(0, qkv.len());
    device.attention(view, heads, &batch, cache.layer(), out.view_mut(0, len)).unwrap();
    read_f32(device, &out, len)
}
