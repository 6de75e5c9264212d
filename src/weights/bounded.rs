//! Small files, read whole, but never more of them than a limit.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Why a small file couldn't be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The system refused, or the path is no regular file (opening a pipe would wait for its writer).
    Io(io::Error),
    /// Longer than the limit.
    TooLarge { bytes: u64 },
}

/// Reads a file of at most `limit_bytes`.
pub(crate) fn read_bounded(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
    let (file, bytes) = open_regular(path).map_err(ReadError::Io)?;
    if bytes > limit_bytes {
        return Err(ReadError::TooLarge { bytes });
    }
    let mut text = Vec::new();
    // One byte more than the limit: a file that grew since is seen as too large, not cut.
    file.take(limit_bytes + 1).read_to_end(&mut text).map_err(ReadError::Io)?;
    match text.len() as u64 {
        read if read > limit_bytes => Err(ReadError::TooLarge { bytes: read }),
        _ => Ok(text),
    }
}

/// Opens a regular file and tells its length; anything else is refused before it is opened.
pub(crate) fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    let not_regular = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
    if !std::fs::metadata(path)?.is_file() {
        return Err(not_regular());
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(not_regular());
    }
    Ok((file, metadata.len()))
}
