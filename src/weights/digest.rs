//! What weights are: a digest over every tensor's name, dtype, shape and bytes.
//!
//! A tensor's bytes are hashed in leaves of 64 KiB with XXH3-128, which costs a tenth of a copy; BLAKE3 takes
//! name, dtype, shape and the leaves' hashes, and then the tensors' digests in name order. So the digest does
//! not depend on how bytes were cut into pieces, nor on files, shards and the order of arrival, and several
//! threads (or blocks of a GPU) can work on one tensor. Prefix-cache keys are seeded with it.
//!
//! It tells any two sets of weights apart that come about by accident, training or transport. It is no defence
//! against somebody who constructs weights in order to collide, as XXH3 is no cryptographic hash: for that,
//! hash what [`Engine::tensor`](crate::Engine::tensor) gives.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use twox_hash::xxhash3_128;

use super::{SourceError, TensorSpec, WeightSource, WeightTensor};

/// Domain of a tensor's digest; the number changes when the encoding does.
const TENSOR_DOMAIN: &[u8] = b"dormouse tensor 1\0";
/// Domain of the digest of a set.
const WEIGHTS_DOMAIN: &[u8] = b"dormouse weights 1\0";
/// Bytes that the short form of a digest shows.
const SHORT_BYTES: usize = 6;

/// Bytes of a leaf: what is hashed in one go, so that several threads work on one tensor.
pub(crate) const LEAF_BYTES: usize = 64 << 10;

/// Digest of one tensor: of its name, dtype, shape and bytes.
///
/// BLAKE3 over, one after the other: the text `dormouse tensor 1` and a zero byte; name and dtype (`f32`, `f16`,
/// `bf16`), each with its length in front; the number of dimensions and each dimension; the XXH3-128 (seed 0)
/// of every 64 KiB of the tensor's bytes, the last ones fewer. Numbers are little-endian, of 64 bits, the XXH3
/// of 128.
///
/// In text and in JSON: 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TensorDigest([u8; 32]);

impl TensorDigest {
    /// The digest of a tensor, as the engine computes it when it comes in.
    pub fn of(tensor: &WeightTensor) -> Self {
        let mut hasher = TensorHasher::new(&tensor.spec);
        hasher.update(&tensor.data);
        hasher.finish()
    }
}

/// Runs a number of tasks on several threads.
type ShareOut<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// Computes a tensor's digest from its bytes, given in order in pieces of any size.
#[derive(Clone)]
pub(crate) struct TensorHasher {
    /// Everything but the bytes, then the leaves so far.
    tree: blake3::Hasher,
    /// The leaf that is not full yet.
    leaf: xxhash3_128::Hasher,
    leaf_bytes: usize,
}

impl fmt::Debug for TensorHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorHasher").field("leaf_bytes", &self.leaf_bytes).finish_non_exhaustive()
    }
}

impl TensorHasher {
    /// Begins with everything but the bytes.
    pub(crate) fn new(spec: &TensorSpec) -> Self {
        let mut tree = blake3::Hasher::new();
        tree.update(TENSOR_DOMAIN);
        update_name(&mut tree, &spec.name);
        update_name(&mut tree, &spec.dtype.to_string());
        tree.update(&(spec.shape.len() as u64).to_le_bytes());
        for &dimension in &spec.shape {
            tree.update(&(dimension as u64).to_le_bytes());
        }
        Self { tree, leaf: xxhash3_128::Hasher::new(), leaf_bytes: 0 }
    }

    /// Takes the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.update_shared(bytes, &|count, work| (0..count).for_each(work));
    }

    /// [`TensorHasher::update`] on several threads.
    pub(crate) fn update_shared(&mut self, mut bytes: &[u8], share_out: ShareOut<'_>) {
        if self.leaf_bytes > 0 {
            let take = bytes.len().min(LEAF_BYTES - self.leaf_bytes);
            self.fill_leaf(&bytes[..take]);
            bytes = &bytes[take..];
        }
        let (leaves, rest) = bytes.as_chunks::<LEAF_BYTES>();
        let hashes: Vec<OnceLock<u128>> = leaves.iter().map(|_| OnceLock::new()).collect();
        share_out(leaves.len(), &|leaf| {
            hashes[leaf].get_or_init(|| xxhash3_128::Hasher::oneshot(&leaves[leaf]));
        });
        for hash in hashes {
            self.tree.update(&hash.into_inner().expect("each leaf was hashed").to_le_bytes());
        }
        self.fill_leaf(rest);
    }

    /// Takes the next bytes of which a device has hashed some: those that go on with the open leaf, the hashes of
    /// leaves, and those that begin another.
    #[cfg(feature = "cuda")]
    pub(crate) fn update_hashed(&mut self, head: &[u8], leaves: &[u128], tail: &[u8]) {
        self.update(head);
        assert!(leaves.is_empty() || self.leaf_bytes == 0, "leaves begin at multiples of their length");
        for leaf in leaves {
            self.tree.update(&leaf.to_le_bytes());
        }
        self.update(tail);
    }

    /// Takes bytes that don't go beyond the open leaf.
    fn fill_leaf(&mut self, bytes: &[u8]) {
        self.leaf.write(bytes);
        self.leaf_bytes += bytes.len();
        if self.leaf_bytes == LEAF_BYTES {
            let leaf = std::mem::take(&mut self.leaf);
            self.tree.update(&leaf.finish_128().to_le_bytes());
            self.leaf_bytes = 0;
        }
    }

    /// The digest of what was taken.
    pub(crate) fn finish(mut self) -> TensorDigest {
        if self.leaf_bytes > 0 {
            self.tree.update(&self.leaf.finish_128().to_le_bytes());
        }
        TensorDigest(*self.tree.finalize().as_bytes())
    }
}

/// A length first, so that no two sequences of fields have one encoding.
fn update_name(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// Digest of a whole set of weights: of the name, dtype, shape and bytes of each tensor, whatever their order.
/// Equal digests mean equal tensors, bit for bit, unless somebody constructed them to collide.
///
/// BLAKE3 over the text `dormouse weights 1` and a zero byte, the number of tensors, and for each tensor, by
/// name, its name with the length in front and its [`TensorDigest`]. Numbers are little-endian, of 64 bits.
///
/// In text and in JSON: 64 hexadecimal digits.
///
/// # Source
/// XXH3-128 (Collet 2019) over leaves of 64 KiB, BLAKE3 (O'Connor et al. 2020) over the rest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WeightsDigest([u8; 32]);

impl WeightsDigest {
    /// The digest of all tensors of a source as they are, for example to tell an engine which it is to expect.
    /// A model's set has no buffers and, if its head is tied, no `lm_head.weight`;
    /// [`Engine::digest_of`](crate::Engine::digest_of) leaves them out itself.
    ///
    /// # Errors
    /// What the source reports; [`SourceError::WrongLength`] if it delivers more or fewer bytes than it lists.
    pub fn of(source: &mut dyn WeightSource) -> Result<Self, SourceError> {
        let specs = source.index()?;
        source.plan(&(0..specs.len()).collect::<Vec<_>>())?;
        let mut digests = Vec::with_capacity(specs.len());
        for (position, spec) in specs.iter().enumerate() {
            let mut hasher = TensorHasher::new(spec);
            let mut received_bytes = 0_usize;
            source.read(position, &mut |piece| {
                received_bytes = received_bytes.saturating_add(piece.len());
                hasher.update(piece);
            })?;
            if spec.checked_bytes() != Some(received_bytes) {
                return Err(SourceError::wrong_length(spec, received_bytes));
            }
            digests.push((spec.name.as_str(), hasher.finish()));
        }
        source.finish()?;
        Ok(Self::combine(digests))
    }

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
}

/// The first bytes of a digest in hexadecimal.
struct Hex([u8; 32], usize);

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..self.1].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What every kind of digest is in text and in JSON.
macro_rules! digest_text {
    ($digest:ident) => {
        impl $digest {
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

        impl fmt::Display for $digest {
            /// All 64 hexadecimal digits; with `{:#}` the short form.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                Hex(self.0, if f.alternate() { SHORT_BYTES } else { self.0.len() }).fmt(f)
            }
        }

        impl fmt::Debug for $digest {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($digest), "({})"), self)
            }
        }

        impl FromStr for $digest {
            type Err = ParseDigestError;

            /// Reads 64 hexadecimal digits of either case.
            fn from_str(text: &str) -> Result<Self, ParseDigestError> {
                parse_hex(text).map(Self)
            }
        }

        impl From<$digest> for String {
            fn from(digest: $digest) -> Self {
                digest.to_string()
            }
        }

        impl TryFrom<String> for $digest {
            type Error = ParseDigestError;

            fn try_from(text: String) -> Result<Self, ParseDigestError> {
                text.parse()
            }
        }
    };
}
digest_text!(TensorDigest);
digest_text!(WeightsDigest);

/// A text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a digest has 64 hexadecimal digits, not {} characters with {:?}", .length, .first_wrong)]
pub struct ParseDigestError {
    /// Characters of the text.
    pub length: usize,
    /// The first one that is no hexadecimal digit.
    pub first_wrong: Option<char>,
}

fn parse_hex(text: &str) -> Result<[u8; 32], ParseDigestError> {
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
    Ok(bytes)
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
        let bytes: Vec<u8> = (0..288_000_u32).map(|i| (i % 251) as u8).collect();
        let a = spec("a", DType::F32, &[720, 100]);
        let whole = digest(&a, &bytes, bytes.len());
        for piece in [1, 3, 64, 1023, 1024, 1025, 65_535, 65_536, 65_537] {
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
    fn the_encoding_is_the_documented_one() {
        let number = |n: usize| (n as u64).to_le_bytes().to_vec();
        let text = |t: &str| [number(t.len()), t.as_bytes().to_vec()].concat();
        let data: Vec<u8> = (0..2 * 70_000_u32).map(|i| (i % 253) as u8).collect();
        let tensor = WeightTensor { spec: spec("a.b", DType::Bf16, &[7, 10_000]), data };
        let leaves =
            tensor.data.chunks(64 << 10).map(|leaf| xxhash3_128::Hasher::oneshot(leaf).to_le_bytes());
        let fields = [
            b"dormouse tensor 1\0".to_vec(),
            text("a.b"),
            text("bf16"),
            number(2),
            number(7),
            number(10_000),
        ];
        let encoded = [fields.concat(), leaves.flatten().collect()].concat();
        let digest = TensorDigest::of(&tensor);
        assert_eq!(digest.as_bytes(), blake3::hash(&encoded).as_bytes());
        let encoded = [b"dormouse weights 1\0".to_vec(), number(1), text("a.b"), digest.as_bytes().to_vec()];
        let set = WeightsDigest::combine([("a.b", digest)]);
        assert_eq!(set.as_bytes(), blake3::hash(&encoded.concat()).as_bytes());
    }

    #[test]
    fn b48_a_source_that_delivers_less_or_more_has_no_digest() {
        struct Source(usize);
        impl WeightSource for Source {
            fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
                Ok(vec![spec("a", DType::F16, &[2])])
            }
            fn read(&mut self, _: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
                sink(&vec![1; self.0]);
                Ok(())
            }
        }
        let set = WeightsDigest::of(&mut Source(4)).unwrap();
        assert_eq!(set, WeightsDigest::combine([("a", digest(&spec("a", DType::F16, &[2]), &[1; 4], 4))]));
        for bytes in [0, 3, 5] {
            let fault = WeightsDigest::of(&mut Source(bytes)).unwrap_err();
            assert!(
                matches!(fault, SourceError::WrongLength { received_bytes, .. } if received_bytes == bytes)
            );
        }
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
        let json = serde_json::to_string(&digest).unwrap();
        assert_eq!(json, format!("{text:?}"));
        assert_eq!(serde_json::from_str::<WeightsDigest>(&json).unwrap(), digest);
        assert!(serde_json::from_str::<WeightsDigest>("\"00\"").is_err());
    }
}
