//! The rules that every bucket keeps, whoever made its table.

use super::{BucketEntry, BucketError, MAX_NAME_BYTES, MAX_RANK};
use crate::weights::TensorSpec;
use crate::weights::json::cut;

/// Checks a tensor alone and gives the bytes that it has.
pub(super) fn tensor(spec: &TensorSpec) -> Result<usize, BucketError> {
    let TensorSpec { name, shape, .. } = spec;
    if name.len() > MAX_NAME_BYTES {
        return Err(BucketError::NameTooLong {
            tensor: cut(name).into(),
            bytes: name.len(),
            limit_bytes: MAX_NAME_BYTES,
        });
    }
    if shape.len() > MAX_RANK {
        let (tensor, dimensions) = (cut(name).into(), shape.len());
        return Err(BucketError::TooManyDimensions { tensor, dimensions, limit: MAX_RANK });
    }
    spec.checked_bytes()
        .ok_or_else(|| BucketError::SizeOverflow { tensor: cut(name).into(), shape: shape.clone() })
}

/// Checks an entry alone.
pub(super) fn entry(entry: &BucketEntry, data_bytes: usize) -> Result<(), BucketError> {
    let tensor_bytes = tensor(&entry.tensor)?;
    let tensor = || cut(&entry.tensor.name).into_owned();
    let (begin, end, offset) = (entry.range.start, entry.range.end, entry.offset);
    if begin > end {
        return Err(BucketError::Inverted { tensor: tensor(), begin, end });
    }
    if end > data_bytes {
        return Err(BucketError::OutsideData { tensor: tensor(), begin, end, data_bytes });
    }
    let bytes = end - begin;
    if bytes == 0 {
        return Err(BucketError::Empty { tensor: tensor(), begin });
    }
    let dtype = entry.tensor.dtype;
    if !offset.is_multiple_of(dtype.size()) || !bytes.is_multiple_of(dtype.size()) {
        return Err(BucketError::Misaligned { tensor: tensor(), dtype, offset, bytes });
    }
    match offset.checked_add(bytes) {
        Some(end) if end <= tensor_bytes => Ok(()),
        _ => Err(BucketError::OutsideTensor { tensor: tensor(), offset, bytes, tensor_bytes }),
    }
}

/// Checks that pieces (tensor, offset in it, length; inside it) agree on their tensors, and that no byte of a
/// tensor is there twice.
pub(super) fn once(mut pieces: Vec<(&TensorSpec, usize, usize)>) -> Result<(), BucketError> {
    pieces.sort_unstable_by_key(|&(spec, offset, _)| (spec.name.as_str(), offset));
    for pair in pieces.windows(2) {
        let ((spec, offset, bytes), (next, next_offset, next_bytes)) = (pair[0], pair[1]);
        if spec.name != next.name {
            continue;
        }
        let tensor = || cut(&spec.name).into_owned();
        if spec != next {
            return Err(BucketError::Conflict {
                tensor: tensor(),
                dtype: spec.dtype,
                shape: spec.shape.clone(),
                other_dtype: next.dtype,
                other_shape: next.shape.clone(),
            });
        }
        let end = (offset + bytes).min(next_offset + next_bytes);
        if next_offset < end {
            return Err(BucketError::Duplicate { tensor: tensor(), begin: next_offset, end });
        }
    }
    Ok(())
}

/// Checks that the ranges, each non-empty and inside, fill the data exactly.
pub(super) fn tiling(entries: &[BucketEntry], data_bytes: usize) -> Result<(), BucketError> {
    let mut sorted: Vec<&BucketEntry> = entries.iter().collect();
    sorted.sort_unstable_by_key(|entry| entry.range.start);
    let mut before: Option<&BucketEntry> = None;
    for entry in sorted {
        let begin = entry.range.start;
        let filled = before.map_or(0, |before| before.range.end);
        if begin > filled {
            return Err(BucketError::Gap { begin: filled, end: begin });
        }
        if let Some(before) = before.filter(|_| begin < filled) {
            return Err(BucketError::Overlap {
                tensor: cut(&entry.tensor.name).into(),
                begin,
                other: cut(&before.tensor.name).into(),
                other_end: filled,
            });
        }
        before = Some(entry);
    }
    let filled = before.map_or(0, |before| before.range.end);
    if filled < data_bytes {
        return Err(BucketError::Gap { begin: filled, end: data_bytes });
    }
    Ok(())
}
