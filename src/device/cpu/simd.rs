//! Sixteen f32 lanes, one source per kernel, the same bits on every instruction set.
//!
//! Each operation of [`Lanes`] is one correctly rounded IEEE operation per lane, so that a kernel's result
//! does not depend on which implementation runs it (NaN payloads excepted).
//!
//! Architecture invariant: the types in `avx2` and `avx512` are named only by [`Simd`], which is made only
//! after detection. That is what makes their methods safe to call.
#![allow(unsafe_code, reason = "calling functions compiled for detected CPU features")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

/// Lanes of a vector, output rows of a panel of packed weights.
pub(super) const LANES: usize = 16;

// Packed weights, safetensors files and the key cache are read with the same loads.
const _: () = assert!(cfg!(target_endian = "little"), "this device is written for little-endian machines");

/// A vector of 16 f32.
pub(super) trait Lanes: Copy {
    /// Vectors that fit the register file; decides the shape of tiles, never a result.
    const REGISTERS: usize;

    /// All lanes `value`.
    fn splat(value: f32) -> Self;
    /// Lane `i` = `from[i]`.
    fn load(from: &[f32; LANES]) -> Self;
    /// `to[i]` = lane `i`.
    fn store(self, to: &mut [f32; LANES]);
    /// Sixteen f32 at any alignment.
    fn load_bytes(from: &[u8; 64]) -> Self;
    /// Sixteen f16 in natural order.
    fn widen_f16(from: &[u8; 32]) -> Self;
    /// Eight u32, of which number `i` holds bf16 lane `i` in its low and lane `i + 8` in its high half.
    fn widen_bf16_pairs(from: &[u8; 32]) -> Self;
    /// `self * factor + addend`, rounded once.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// `self / other`.
    fn div(self, other: Self) -> Self;
    /// `if self > other { self } else { other }`: a NaN in either gives `other`.
    fn max(self, other: Self) -> Self;
    /// `if self < other { self } else { other }`: a NaN in either gives `other`.
    fn min(self, other: Self) -> Self;
    /// The bit patterns shifted left by 23: the low bits become the exponent.
    fn shift_to_exponent(self) -> Self;
    /// Asks for the cache line at `address`, which need not exist.
    fn prefetch(address: *const u8);

    /// The elements of `from`, at most 16 of them, then `fill`.
    #[inline(always)]
    fn load_first(from: &[f32], fill: f32) -> Self {
        match from.first_chunk::<LANES>() {
            Some(full) => Self::load(full),
            None => {
                let mut padded = [fill; LANES];
                padded[..from.len()].copy_from_slice(from);
                Self::load(&padded)
            }
        }
    }

    /// The first lanes, as many as `to` has elements, at most 16.
    #[inline(always)]
    fn store_first(self, to: &mut [f32]) {
        match to.first_chunk_mut::<LANES>() {
            Some(full) => self.store(full),
            None => {
                let mut padded = [0.0; LANES];
                self.store(&mut padded);
                let count = to.len();
                to.copy_from_slice(&padded[..count]);
            }
        }
    }

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut array = [0.0; LANES];
        self.store(&mut array);
        array
    }

    /// The sum in a fixed tree: lanes 8 apart, then 4, 2, 1.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = self.to_array();
        let mut half = LANES / 2;
        while half > 0 {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// The greatest lane; NaN lanes are ignored or returned, depending on their place only.
    #[inline(always)]
    fn greatest(self) -> f32 {
        let lanes = self.to_array();
        lanes[1..].iter().fold(lanes[0], |most, &lane| if most > lane { most } else { lane })
    }
}

/// Which instruction set runs the kernels. The results are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SimdPath {
    /// The best that the machine has.
    #[default]
    Auto,
    /// AVX2 with FMA and F16C, or portable code where the machine lacks them.
    Avx2,
    /// No instruction set beyond the target's baseline.
    Portable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

/// Proof that the machine has the instruction set it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Simd(Path);

/// Work that is compiled once per instruction set.
pub(super) trait Kernel {
    /// What it returns.
    type Output;
    /// Does the work. Implementations are `#[inline(always)]`, so that the body takes on the caller's CPU
    /// features.
    fn run<L: Lanes>(self) -> Self::Output;
}

impl Simd {
    /// The best instruction set that the machine has and `path` allows.
    pub(super) fn detect(path: SimdPath) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            match path {
                SimdPath::Auto if avx512 => return Self(Path::Avx512),
                SimdPath::Auto | SimdPath::Avx2 if avx2 => return Self(Path::Avx2),
                _ => {}
            }
        }
        let _ = path;
        Self(Path::Portable)
    }

    /// Its name, for reports.
    #[cfg(test)]
    pub(super) fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => "avx2",
            Path::Portable => "portable",
        }
    }

    /// Rows of the tallest tile (see `chain`).
    pub(super) fn tile_rows(self) -> usize {
        struct TileRows;
        impl Kernel for TileRows {
            type Output = usize;
            #[inline(always)]
            fn run<L: Lanes>(self) -> usize {
                super::chain::tile_rows::<L>()
            }
        }
        self.run(TileRows)
    }

    /// Runs `kernel` compiled for this instruction set.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `detect` made this value, so the machine has the features.
            Path::Avx512 => unsafe { run_avx512(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Path::Avx2 => unsafe { run_avx2(kernel) },
            Path::Portable => kernel.run::<portable::Portable>(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx512::Avx512>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<avx2::Avx2>()
}
