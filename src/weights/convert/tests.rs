use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// One element by the `half` crate; NaN as `None`, since its payload is nobody's business.
fn oracle(from: DType, bytes: &[u8], to: DType) -> Option<Vec<u8>> {
    let value = match from {
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        DType::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
        DType::Bf16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
    };
    (!value.is_nan()).then(|| match to {
        DType::F32 => value.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    })
}

fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    oracle(dtype, bytes, DType::F32).is_none()
}

/// Converts to every dtype, in every way there is, and compares each element.
fn check(from: DType, input: &[u8]) {
    let elements = input.len() / from.size();
    let mut wide = vec![0.0; elements];
    widen(from, input, &mut wide);
    for to in DTYPES {
        let mut out = vec![0; elements * to.size()];
        convert(from, input, to, &mut out);
        let mut narrowed = vec![0; out.len()];
        narrow(&wide, to, &mut narrowed);
        let pairs = input.chunks(from.size()).zip(out.chunks(to.size()).zip(narrowed.chunks(to.size())));
        for (x, (converted, narrowed)) in pairs {
            match oracle(from, x, to) {
                Some(expected) => {
                    assert_eq!(converted, expected, "{from} {x:02x?} to {to}");
                    assert_eq!(narrowed, expected, "{from} {x:02x?} through f32 to {to}");
                }
                None => {
                    assert!(is_nan(to, converted), "{from} {x:02x?} to {to}");
                    assert!(is_nan(to, narrowed), "{from} {x:02x?} through f32 to {to}");
                }
            }
        }
    }
}

fn all_halves() -> Vec<u8> {
    (0..=u16::MAX).flat_map(u16::to_le_bytes).collect()
}

#[test]
fn every_f16_and_every_bf16_converts_as_half_does() {
    check(DType::F16, &all_halves());
    check(DType::Bf16, &all_halves());
}

/// Every f16 and bf16 as f32, the points halfway to the next one, and the neighbours of both.
#[test]
fn ties_subnormals_and_limits_round_as_half_does() {
    let mut bits = Vec::new();
    for pattern in 0..=u16::MAX {
        let narrow = f16::from_bits(pattern).to_f32().to_bits();
        let tie16 = ((f64::from(f16::from_bits(pattern).to_f32())
            + f64::from(f16::from_bits(pattern.wrapping_add(1)).to_f32()))
            / 2.0) as f32;
        let upper = u32::from(pattern) << 16;
        for middle in [narrow, tie16.to_bits(), upper, upper | 0x8000] {
            bits.extend([middle.wrapping_sub(1), middle, middle.wrapping_add(1)]);
        }
    }
    // Around f16's largest, where it turns to infinity, its smallest, and half of that.
    for value in [65504.0f32, 65519.996, 65520.0, 65536.0, 131_008.0, 5.960_464_5e-8, 2.980_232_2e-8, 1e-45] {
        let middle = value.to_bits();
        bits.extend((middle.saturating_sub(40)..middle + 40).flat_map(|bits| [bits, bits | 1 << 31]));
    }
    bits.extend([0x7f7f_ffff, 0x7f80_0000, 0x7f80_0001, 0x7fbf_ffff, 0x7fff_ffff, 0xff80_0001, 0xffff_ffff]);
    check(DType::F32, &bits.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<u8>>());
}

#[test]
fn same_dtype_keeps_every_bit_and_alignment_does_not_matter() {
    let halves = all_halves();
    for dtype in DTYPES {
        let mut out = vec![0; halves.len()];
        convert(dtype, &halves, dtype, &mut out);
        assert_eq!(out, halves);
    }
    let mut shifted = vec![0; halves.len() + 1];
    shifted[1..].copy_from_slice(&halves);
    let mut out = vec![0; 2 * halves.len() + 3];
    convert(DType::F16, &shifted[1..], DType::F32, &mut out[3..]);
    let mut expected = vec![0; 2 * halves.len()];
    convert(DType::F16, &halves, DType::F32, &mut expected);
    assert_eq!(out[3..], expected);
    for from in DTYPES {
        for to in DTYPES {
            convert(from, &[], to, &mut []);
        }
        assert_eq!(first_non_finite(from, &[]), None);
    }
}

#[test]
fn every_pattern_that_is_no_number_is_found() {
    for pattern in 0..=u16::MAX {
        let found = |dtype| first_non_finite(dtype, &pattern.to_le_bytes()).is_some();
        assert_eq!(found(DType::F16), !f16::from_bits(pattern).is_finite(), "{pattern:04x}");
        assert_eq!(found(DType::Bf16), !bf16::from_bits(pattern).is_finite(), "{pattern:04x}");
        for low in [0u32, 1, 0x8000, 0xffff] {
            let wide = u32::from(pattern) << 16 | low;
            let found = first_non_finite(DType::F32, &wide.to_le_bytes()).is_some();
            assert_eq!(found, !f32::from_bits(wide).is_finite(), "{wide:08x}");
        }
    }
}

#[test]
fn the_first_of_several_is_found_wherever_it_lies() {
    for dtype in DTYPES {
        let per_block = SEARCH_BYTES / dtype.size();
        let elements = 3 * per_block + 7;
        let mut largest = vec![0; dtype.size()];
        let mut infinity = vec![0; dtype.size()];
        narrow(&[if dtype == DType::F16 { 65504.0 } else { 3e38 }], dtype, &mut largest);
        narrow(&[f32::NEG_INFINITY], dtype, &mut infinity);
        let finite = largest.repeat(elements);
        assert_eq!(first_non_finite(dtype, &finite), None);
        for first in [0, 1, per_block - 1, per_block, 2 * per_block + 5, elements - 2] {
            let mut bytes = finite.clone();
            for place in [first, elements - 1] {
                bytes[place * dtype.size()..][..dtype.size()].copy_from_slice(&infinity);
            }
            assert_eq!(first_non_finite(dtype, &bytes), Some(first), "{dtype}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn any_f32_converts_as_half_does(bits in prop::collection::vec(any::<u32>(), 0..300)) {
        check(DType::F32, &bits.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<u8>>());
    }

    #[test]
    fn f32_in_the_range_of_f16_converts_as_half_does(
        parts in prop::collection::vec((any::<bool>(), 96u32..146, any::<u32>()), 1..300),
    ) {
        let bits = parts.iter().map(|&(sign, exponent, low)| {
            u32::from(sign) << 31 | exponent << 23 | low & 0x7f_ffff
        });
        check(DType::F32, &bits.flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    }
}

/// `cargo test --release --lib conversion_speed -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn conversion_speed() {
    let elements = 1 << 20;
    let values: Vec<f32> = (0..elements).map(|i| (i as f32 * 0.37).sin()).collect();
    for from in DTYPES {
        let mut input = vec![0; elements * from.size()];
        narrow(&values, from, &mut input);
        for to in DTYPES {
            let mut out = vec![0; elements * to.size()];
            let best = best_of(|| convert(from, std::hint::black_box(&input), to, &mut out));
            let rate = (input.len() + out.len()) as f64 / best / 1e9;
            eprintln!(
                "{from} to {to}: {:.2} G elements/s, {rate:.1} GB/s in and out",
                elements as f64 / best / 1e9
            );
        }
        let best = best_of(|| assert_eq!(first_non_finite(from, std::hint::black_box(&input)), None));
        eprintln!("{from} finite: {:.1} GB/s", input.len() as f64 / best / 1e9);
    }
}

fn best_of(mut run: impl FnMut()) -> f64 {
    let time = |_| {
        let start = std::time::Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    (0..30).map(time).fold(f64::INFINITY, f64::min)
}
