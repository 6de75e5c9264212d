//! What weights are: a digest over every tensor's name, dtype, shape and bytes.
//!
//! A tensor's digest depends on nothing else, in particular not on how its bytes were cut into pieces; the
//! digest of a set is taken over its tensors in name order, so that files, shards and arrival order don't
//! matter. Prefix-cache keys are seeded with it: two sets with one digest are interchangeable.

use std::fmt;
use std::str::FromStr;

use super::TensorSpec;

/// Domain of a tensor's digest; the number changes when the encoding does.
const TENSOR_DOMAIN: &[u8] = b"dormouse tensor 1\0";
/// Domain of the digest of a set.
const WEIGHTS_DOMAIN: &[u8] = b"dormouse weights 1\0";
/// Bytes that the short form of a digest shows.
const SHORT_BYTES: usize = 6;

/// Digest of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TensorDigest([u8; 32]);

/// Computes a tensor's digest from its bytes, given in order in pieces of any size.
#[derive(Debug, Clone)]
pub(crate) struct TensorHasher {
    hasher: blake3::Hasher,
}

impl TensorHasher {
    /// Begins with everything but the bytes.
    pub(crate) fn new(spec: &TensorSpec) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(TENSOR_DOMAIN);
        update_name(&mut hasher, &spec.name);
        update_name(&mut hasher, &spec.dtype.to_string());
        hasher.update(&(spec.shape.len() as u64).to_le_bytes());
        for &dimension in &spec.shape {
            hasher.update(&(dimension as u64).to_le_bytes());
        }
        Self { hasher }
    }

    /// Takes the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// The digest of what was taken.
    pub(crate) fn finish(&self) -> TensorDigest {
        TensorDigest(*self.hasher.finalize().as_bytes())
    }
}

/// A length first, so that no two sequences of fields have one encoding.
fn update_name(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// Digest of a whole set of weights. Equal digests mean equal tensors, bit for bit.
///
/// # Source
/// BLAKE3 (O'Connor et al. 2020), 256 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightsDigest([u8; 32]);

impl WeightsDigest {
    /// Combines the digests of all tensors of a set, in any order.
    pub(crate) fn combine<'a>(tensors: impl IntoIterator<Item = (&'a str, TensorDigest)>) -> Self {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_unstable_by_key(|(name, digest)| (*name, digest.0));
        let mut hasher = blake3::Hasher::new();
        hasher.update(WEIGHTS_DOMAIN);
        hasher.update(&(tensors.len() as u64).to_le_bytes());
        for (name, digest) in tensors {
            update_name(&mut hasher, name);
            hasher.update(&digest.0);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Wraps the bytes of a digest.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first 12 hexadecimal digits, for logs.
    pub fn short(&self) -> impl fmt::Display + use<> {
        Hex(self.0, SHORT_BYTES)
    }
}

/// The first bytes of a digest in hexadecimal.
struct Hex([u8; 32], usize);

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..self.1].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl From<[u8; 32]> for WeightsDigest {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for WeightsDigest {
    /// All 64 hexadecimal digits; with `{:#}` the [short](WeightsDigest::short) form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(self.0, if f.alternate() { SHORT_BYTES } else { self.0.len() }).fmt(f)
    }
}

impl fmt::Debug for WeightsDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightsDigest({self})")
    }
}

/// A text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a weights digest has 64 hexadecimal digits, not {} characters with {:?}", .length, .first_wrong)]
pub struct ParseDigestError {
    /// Characters of the text.
    pub length: usize,
    /// The first one that is no hexadecimal digit.
    pub first_wrong: Option<char>,
}

impl FromStr for WeightsDigest {
    type Err = ParseDigestError;

    /// Reads 64 hexadecimal digits of either case.
    fn from_str(text: &str) -> Result<Self, ParseDigestError> {
        let fault = || ParseDigestError {
            length: text.chars().count(),
            first_wrong: text.chars().find(|digit| !digit.is_ascii_hexdigit()),
        };
        let mut bytes = [0; 32];
        if text.len() != 2 * bytes.len() {
            return Err(fault());
        }
        let digits = text.bytes().map(|digit| char::from(digit).to_digit(16));
        for (i, digit) in digits.enumerate() {
            let digit = digit.and_then(|digit| u8::try_from(digit).ok()).ok_or_else(fault)?;
            bytes[i / 2] = bytes[i / 2] << 4 | digit;
        }
        Ok(Self(bytes))
    }
}

/// Which weights an engine has: how many commits it has seen, and what the last one brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightVersion {
    /// Counts commits of this engine, loads and updates alike, from 1.
    pub counter: u64,
    /// The weights themselves; the same after an update with equal tensors.
    pub digest: WeightsDigest,
}

impl fmt::Display for WeightVersion {
    /// Such as `3@a1b2c3d4e5f6`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.counter, self.digest.short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::DType;

    fn spec(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: name.into(), dtype, shape: shape.to_vec() }
    }

    fn digest(spec: &TensorSpec, bytes: &[u8], piece: usize) -> TensorDigest {
        let mut hasher = TensorHasher::new(spec);
        bytes.chunks(piece).for_each(|piece| hasher.update(piece));
        hasher.finish()
    }

    #[test]
    fn c29_digest_does_not_depend_on_pieces_or_order() {
        let bytes: Vec<u8> = (0..96_000_u32).map(|i| (i % 251) as u8).collect();
        let a = spec("a", DType::F32, &[240, 100]);
        let whole = digest(&a, &bytes, bytes.len());
        for piece in [1, 3, 64, 1023, 1024, 1025, 65_536] {
            assert_eq!(digest(&a, &bytes, piece), whole);
        }
        let b = digest(&spec("b", DType::F16, &[2]), b"1234", 4);
        assert_eq!(
            WeightsDigest::combine([("a", whole), ("b", b)]),
            WeightsDigest::combine([("b", b), ("a", whole)])
        );
        assert_ne!(WeightsDigest::combine([("a", whole), ("b", b)]), WeightsDigest::combine([("a", whole)]));
        assert_ne!(
            WeightsDigest::combine([("a", whole), ("b", b)]),
            WeightsDigest::combine([("a", b), ("b", whole)])
        );
    }

    #[test]
    fn digest_depends_on_every_field() {
        let base = digest(&spec("ab", DType::F16, &[2, 3]), b"123456789012", 5);
        let others = [
            digest(&spec("a", DType::F16, &[2, 3]), b"123456789012", 5),
            digest(&spec("ab", DType::Bf16, &[2, 3]), b"123456789012", 5),
            digest(&spec("ab", DType::F32, &[1, 3]), b"123456789012", 5),
            digest(&spec("ab", DType::F16, &[3, 2]), b"123456789012", 5),
            digest(&spec("ab", DType::F16, &[6]), b"123456789012", 5),
            digest(&spec("ab", DType::F16, &[2, 3]), b"123456789013", 5),
        ];
        assert!(others.iter().all(|other| *other != base));
    }

    #[test]
    fn text_form_round_trips_and_rejects_garbage() {
        let digest = WeightsDigest::combine([]);
        let text = digest.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse(), Ok(digest));
        assert_eq!(text.to_uppercase().parse(), Ok(digest));
        assert_eq!(digest.short().to_string(), text[..12]);
        assert_eq!(format!("{digest:#}"), text[..12]);
        for wrong in
            ["", "00", &text[1..], &format!("{text}0"), &text.replace(&text[..1], "g"), &"é".repeat(32)]
        {
            assert!(wrong.parse::<WeightsDigest>().is_err(), "{wrong}");
        }
        let version = WeightVersion { counter: 3, digest };
        assert_eq!(version.to_string(), format!("3@{}", &text[..12]));
    }
}
