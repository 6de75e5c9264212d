//! Safetensors bytes built by hand, and whole loads of a source.

use super::{SourceError, TensorSpec, WeightSource};

/// A tensor for [`file`]: name, dtype as the file spells it, shape, bytes.
pub(crate) type Tensor<'a> = (&'a str, &'a str, &'a [usize], &'a [u8]);

/// Length, header and data, whatever they say.
pub(crate) fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The header of tensors that lie one behind the other.
pub(crate) fn header(tensors: &[Tensor<'_>]) -> String {
    let mut begin = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape, data)| {
            let end = begin + data.len();
            let entry = format!(
                r#"{}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#,
                serde_json::to_string(name).unwrap()
            );
            begin = end;
            entry
        })
        .collect();
    format!("{{{}}}", entries.join(","))
}

/// A valid file, its header padded by `padding` spaces.
pub(crate) fn padded_file(tensors: &[Tensor<'_>], padding: usize) -> Vec<u8> {
    let data: Vec<u8> = tensors.iter().flat_map(|(_, _, _, data)| data.iter().copied()).collect();
    raw(&(header(tensors) + &" ".repeat(padding)), &data)
}

/// A valid file.
pub(crate) fn file(tensors: &[Tensor<'_>]) -> Vec<u8> {
    padded_file(tensors, 0)
}

/// Lists and reads everything.
pub(crate) fn load(source: &mut dyn WeightSource) -> Result<Vec<(TensorSpec, Vec<u8>)>, SourceError> {
    let specs = source.index()?;
    let mut tensors = Vec::new();
    for (i, spec) in specs.into_iter().enumerate() {
        let mut bytes = Vec::new();
        source.read(i, &mut |piece| bytes.extend_from_slice(piece))?;
        assert_eq!(Some(bytes.len()), spec.checked_bytes(), "{spec:?}");
        tensors.push((spec, bytes));
    }
    source.finish()?;
    Ok(tensors)
}

/// One random edit of a byte string: overwrite, insert, delete, cut, repeat or splice in something pointed.
pub(crate) fn edit(bytes: &mut Vec<u8>, (kind, position, value): (u8, usize, u8)) {
    const POINTED: [&[u8]; 10] =
        [b"{", b"}", b"[", b"\"", b"-1", b"1e999", b"null", b"18446744073709551615", b"\\u0000", b"\xff"];
    let at = position % (bytes.len() + 1);
    match kind % 6 {
        0 if at < bytes.len() => bytes[at] = value,
        1 => bytes.insert(at, value),
        2 if at < bytes.len() => drop(bytes.remove(at)),
        3 => bytes.truncate(at),
        4 => {
            let end = bytes.len().min(at + usize::from(value));
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        _ => drop(bytes.splice(at..at, POINTED[usize::from(value) % POINTED.len()].iter().copied())),
    }
}
