//! Weights from another process: through shared memory, announced over a Unix socket.
//!
//! The engine's process makes a memory file of two halves and passes its descriptor to the trainer's process.
//! The trainer fills one half while the engine copies the other out; a half is the trainer's again when the
//! engine has said so, which it does only after it has copied all of it. What the engine digests and stores
//! is its own copy, so a trainer that writes where it should not can spoil its own update, nothing else.
//!
//! # Protocol, version 1
//!
//! A stream socket. Each message is a length (u32, little-endian, not counting itself) and that many bytes of
//! JSON in UTF-8: an object with one key, the message's name, whose value is an object of fields. Unknown
//! messages and fields are errors. *Engine* and *trainer* below are the two processes.
//!
//! ```text
//! engine                                                        trainer
//!   {"welcome":{"protocol":1,"half_bytes":H}} + descriptor ──▶            once, after accept
//!
//!           ◀── {"index":{"tensors":[{"name":N,"dtype":D,"shape":S}, …],"unsupported":[…]}}
//!   {"want":{"tensors":[2,0,…]}} ─────────────────────────────▶           any number of times
//!           ◀── {"filled":{"half":0,"bytes":B}}
//!           ◀── {"filled":{"half":1,"bytes":B}}
//!   {"taken":{"half":0}} ─────────────────────────────────────▶
//!           ◀── {"filled":{"half":0,"bytes":B}}                           and so on
//!   {"finish":{}} ────────────────────────────────────────────▶
//!           ◀── {"sent":{}}
//!   {"committed":{"counter":7,"digest":"…64 hex digits…"}} ───▶           then the next index, if any
//!
//!   {"refused":{"reason":"…"}} ───────────────────────────────▶           instead of anything
//!           ◀── {"abort":{"reason":"…"}}                                  instead of anything
//! ```
//!
//! - `welcome` carries one descriptor (`SCM_RIGHTS`, with its first byte): a memory file of `2 * half_bytes`
//!   whose size is sealed. Half 0 is its first `half_bytes` bytes, half 1 the rest. The trainer maps it, or
//!   writes it with `pwrite`. No other message may carry a descriptor.
//! - `index` lists what the trainer has: `dtype` is `"F32"`, `"F16"` or `"BF16"`, `shape` a list of at most 8
//!   dimensions, row-major, a name has at most 1024 bytes. `unsupported` may be left out; it lists
//!   `{"name":N,"dtype":"as the trainer spells it"}` for tensors of other element types. Both together have
//!   at most 2^20 entries.
//! - `want` names tensors by position in the index. The trainer writes their bytes (little-endian, without
//!   gaps, one tensor directly behind the other) into the halves in turn, beginning with half 0 for each
//!   `want`. `filled` says that `bytes` bytes lie at the begin of a half: `half_bytes`, or the rest if that
//!   is less. A half may hold parts of several tensors, and is written again only after its `taken`. When
//!   `want` comes, both halves are the trainer's. Tensors without bytes are passed over.
//! - `finish` asks whether all that was sent belongs together, `sent` says so: a trainer whose weights
//!   changed meanwhile answers `abort`.
//! - `committed` and `refused` end the update; a version that has a label comes with `"label"`. After a
//!   `refused` that comes while bytes of a `want` are still to be copied, after `abort`, and after any error,
//!   both sides close the socket. The engine then empties the memory, whoever still has the descriptor.
//! - A message has at most 64 KiB; `index` 64 MiB, `want` 16 MiB.
//!
//! Each side waits for the other at most for its own deadline, counted for one whole message. As halves are
//! filled, that bounds a whole update: by the number of halves it takes.
//!
//! `tests/common/trainer.rs` is a trainer that knows nothing of this crate but the above.

mod channel;
mod client;
mod error;
mod message;
mod source;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use client::SharedMemoryClient;
pub use error::{ProtocolViolation, SharedMemoryError};
pub use source::SharedMemorySource;

/// What the engine's side of a connection may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedMemoryOptions {
    /// Bytes of each of the two halves, at least 64. Both are allocated at once and held as long as the
    /// connection is. Halves that fit the processor's caches are faster than large ones.
    pub half_bytes: usize,
    /// Longest wait for one message of the trainer, or for room to send one. An update takes many: one that
    /// goes on in small steps may last.
    pub deadline: Duration,
}

impl Default for SharedMemoryOptions {
    /// Halves of 4 MiB, a minute.
    fn default() -> Self {
        Self { half_bytes: 4 << 20, deadline: Duration::from_secs(60) }
    }
}

/// Smallest half, in bytes.
const MIN_HALF_BYTES: usize = 64;
