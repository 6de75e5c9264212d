//! Flattened weights: a model sent as a sequence of byte buffers, each with a table of what is in it.

mod check;
mod error;
mod table;
#[cfg(test)]
mod tests;
mod writer;

use std::fmt;
use std::ops::Range;

pub use self::error::BucketError;
pub use self::writer::BucketWriter;
use super::TensorSpec;

/// The first bytes of an encoded bucket.
const MAGIC: [u8; 8] = *b"DORMOUSE";
/// The encoding that is described at [`Bucket`].
const VERSION: u32 = 1;
/// Magic, version, length of the table, length of the data.
const PREFIX_BYTES: usize = 24;
/// Longest table, in bytes; bounds, with [`MAX_ENTRIES`], what a hostile one makes us allocate.
const MAX_TABLE_BYTES: usize = 64 << 20;
/// Most entries of one bucket.
const MAX_ENTRIES: usize = 1 << 16;
/// Longest name of a tensor, in bytes.
const MAX_NAME_BYTES: usize = 4096;
/// Most dimensions of a tensor.
const MAX_RANK: usize = 8;

/// One piece of a tensor, or a whole tensor, and where it is in a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketEntry {
    /// The whole tensor that this is a piece of.
    pub tensor: TensorSpec,
    /// Where the piece begins, in bytes from the begin of the tensor, row-major and little-endian.
    pub offset: usize,
    /// The piece's bytes in the bucket's data.
    pub range: Range<usize>,
}

/// A part of a model: bytes, and a table that says which bytes of which tensors they are.
///
/// A trainer sends a model as a sequence of buckets ([`BucketWriter`]). A bucket holds many tensors, and a
/// tensor may be spread over many buckets. What a `Bucket` promises, whoever built it:
///
/// - every byte of the data belongs to exactly one entry, whatever the order of the entries;
/// - every entry is a non-empty run of whole elements inside its tensor;
/// - no byte of a tensor is there twice, and entries of one name agree in element type and shape.
///
/// Whether all buckets together are a model is for the load to say.
///
/// # Encoding
/// Integers are little-endian, and the length is exact. The buffer may be at any address.
///
/// | bytes | what |
/// |---|---|
/// | 8 | `DORMOUSE` |
/// | 4 | version: 1 |
/// | 4 | length of the table in bytes, 64 MiB at most |
/// | 8 | length of the data in bytes |
/// | | the table |
/// | | the data |
///
/// The table is JSON in UTF-8: an object with the list `tensors` of at most 65,536 objects with the keys
/// `name` (4096 bytes at most), `dtype` (`F32`, `F16` or `BF16`), `shape` (of the whole tensor; 8 dimensions
/// at most), `offset` (bytes into the tensor; 0 if left out) and `range` (begin and end in the data). Other
/// keys, and keys that occur twice, are errors. Tensors without elements are in no bucket.
///
/// In Python:
///
/// ```text
/// import json, struct
///
/// def bucket(pieces):
///     """Encodes a list of (name, dtype, shape, offset, data), for example ("lm_head.weight", "BF16",
///     list(t.shape), 0, t.detach().cpu().reshape(-1).view(torch.uint8).numpy())."""
///     tensors, end = [], 0
///     for name, dtype, shape, offset, data in pieces:
///         begin, end = end, end + len(data)
///         tensors.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset,
///                         "range": [begin, end]})
///     table = json.dumps({"tensors": tensors}).encode()
///     return b"".join([b"DORMOUSE", struct.pack("<IIQ", 1, len(table), end), table,
///                      *(data for *_, data in pieces)])
/// ```
///
/// # Examples
/// ```
/// use dormouse::{Bucket, BucketEntry, DType, TensorSpec};
///
/// let tensor = TensorSpec { name: "norm.weight".into(), dtype: DType::F32, shape: vec![3] };
/// let data = [1.0_f32, 2.0].map(f32::to_le_bytes).concat();
/// let bucket = Bucket::new(vec![BucketEntry { tensor, offset: 4, range: 0..8 }], &data)?;
/// for (entry, bytes) in bucket.pieces() {
///     assert_eq!((entry.tensor.name.as_str(), entry.offset, bytes.len()), ("norm.weight", 4, 8));
/// }
/// # Ok::<(), dormouse::BucketError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Bucket<'a> {
    entries: Vec<BucketEntry>,
    data: &'a [u8],
}

impl<'a> Bucket<'a> {
    /// Makes a bucket of a table and its data.
    ///
    /// # Errors
    /// A [`BucketError`] that says what the table gets wrong.
    pub fn new(entries: Vec<BucketEntry>, data: &'a [u8]) -> Result<Self, BucketError> {
        if entries.len() > MAX_ENTRIES {
            return Err(BucketError::TooManyEntries { limit: MAX_ENTRIES });
        }
        entries.iter().try_for_each(|entry| check::entry(entry, data.len()))?;
        Self::of_checked_entries(entries, data)
    }

    /// Reads an encoded bucket; the data stay where they are.
    ///
    /// Memory used is bounded by the format's limits, whatever the bytes say.
    ///
    /// # Errors
    /// A [`BucketError`]: any byte that isn't as the encoding says is one.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, BucketError> {
        let (table, data) = split(bytes)?;
        let table = std::str::from_utf8(table)
            .map_err(|fault| BucketError::TableNotUtf8 { valid_bytes: fault.valid_up_to() })?;
        Self::of_checked_entries(table::parse(table, data.len())?, data)
    }

    /// Checks a table whose data nobody here can look at, and which need not fill them.
    #[cfg(feature = "cuda")]
    pub(super) fn check(entries: &[BucketEntry], data_bytes: usize) -> Result<(), BucketError> {
        if entries.len() > MAX_ENTRIES {
            return Err(BucketError::TooManyEntries { limit: MAX_ENTRIES });
        }
        entries.iter().try_for_each(|entry| check::entry(entry, data_bytes))?;
        check::once(entries.iter().map(|entry| (&entry.tensor, entry.offset, entry.range.len())).collect())
    }

    /// What is left to check when each entry is right by itself.
    fn of_checked_entries(entries: Vec<BucketEntry>, data: &'a [u8]) -> Result<Self, BucketError> {
        check::once(entries.iter().map(|entry| (&entry.tensor, entry.offset, entry.range.len())).collect())?;
        check::tiling(&entries, data.len())?;
        Ok(Self { entries, data })
    }

    /// The table, in its own order.
    pub fn entries(&self) -> &[BucketEntry] {
        &self.entries
    }

    /// The entries with their bytes, in the table's order.
    pub fn pieces(&self) -> impl Iterator<Item = (&BucketEntry, &'a [u8])> {
        self.entries.iter().map(|entry| (entry, &self.data[entry.range.clone()]))
    }

    /// All data, in the order of the entries' ranges.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }
}

impl fmt::Debug for Bucket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (entries, data_bytes) = (self.entries.len(), self.data.len());
        f.debug_struct("Bucket").field("entries", &entries).field("data_bytes", &data_bytes).finish()
    }
}

/// What stands before the table.
fn prefix(table_bytes: u32, data_bytes: u64) -> [u8; PREFIX_BYTES] {
    let mut prefix = [0; PREFIX_BYTES];
    prefix[..8].copy_from_slice(&MAGIC);
    prefix[8..12].copy_from_slice(&VERSION.to_le_bytes());
    prefix[12..16].copy_from_slice(&table_bytes.to_le_bytes());
    prefix[16..].copy_from_slice(&data_bytes.to_le_bytes());
    prefix
}

/// Table and data of encoded bytes, their lengths checked.
fn split(bytes: &[u8]) -> Result<(&[u8], &[u8]), BucketError> {
    let shown = bytes.len().min(MAGIC.len());
    if bytes[..shown] != MAGIC[..shown] {
        return Err(not_a_bucket(bytes));
    }
    let actual_bytes = bytes.len() as u64;
    let mut rest = bytes;
    let fields = (take::<8>(&mut rest), take(&mut rest), take(&mut rest), take(&mut rest));
    let (Some(_), Some(version), Some(table_bytes), Some(data_bytes)) = fields else {
        return Err(BucketError::Truncated { expected_bytes: PREFIX_BYTES as u64, actual_bytes });
    };
    let version = u32::from_le_bytes(version);
    if version != VERSION {
        return Err(BucketError::UnknownVersion { version, supported: VERSION });
    }
    let table_bytes = u32::from_le_bytes(table_bytes);
    if table_bytes as usize > MAX_TABLE_BYTES {
        return Err(BucketError::TableTooLong {
            bytes: u64::from(table_bytes),
            limit_bytes: MAX_TABLE_BYTES as u64,
        });
    }
    let before_data = PREFIX_BYTES as u64 + u64::from(table_bytes);
    let expected_bytes = before_data.saturating_add(u64::from_le_bytes(data_bytes));
    match rest.split_at_checked(table_bytes as usize) {
        Some(halves) if expected_bytes == actual_bytes => Ok(halves),
        Some(_) if expected_bytes < actual_bytes => {
            Err(BucketError::TrailingBytes { expected_bytes, actual_bytes })
        }
        _ => Err(BucketError::Truncated { expected_bytes, actual_bytes }),
    }
}

/// The next `N` bytes, if there are as many.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (&taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(taken)
}

/// Says what bytes without our magic are, if they are something that is sent by mistake.
fn not_a_bucket(bytes: &[u8]) -> BucketError {
    match bytes {
        [0x80, 0x02..=0x05, ..] => BucketError::Pickle,
        [b'P', b'K', ..] => BucketError::ZipFile,
        // A header's length below 4 GiB, then the header.
        [_, _, _, _, 0, 0, 0, 0, b'{', ..] => BucketError::SafetensorsFile,
        _ => BucketError::WrongMagic {
            begin: bytes[..bytes.len().min(MAGIC.len())].escape_ascii().to_string(),
        },
    }
}
