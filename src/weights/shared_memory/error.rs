//! What can go wrong between two processes.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::device::DeviceError;
use crate::weights::SourceError;

/// A transfer through shared memory that failed. Unless a variant says otherwise the connection is closed,
/// its memory given back, and every later call on it returns [`SharedMemoryError::Ended`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedMemoryError {
    /// The engine's socket could not be connected to.
    #[error("{}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The system refused an operation on the socket.
    #[error("{operation} failed on the socket: {source}")]
    Socket {
        /// The operation.
        operation: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// The shared memory could not be made or mapped.
    #[error(transparent)]
    Memory(#[from] DeviceError),
    /// Halves of fewer bytes than a transfer needs. Nothing was made.
    #[error("halves of {half_bytes} bytes, {min_bytes} at least")]
    HalfTooSmall {
        /// Bytes of a half as asked for.
        half_bytes: usize,
        /// The least.
        min_bytes: usize,
    },
    /// The other process closed the connection, or is no more.
    #[error("the other process is gone, while {waiting_for} was waited for")]
    Gone {
        /// What was to come, or to be taken, next.
        waiting_for: &'static str,
    },
    /// The other process is there but did not go on in time.
    #[error("waited {waited:?} for {waiting_for}")]
    Deadline {
        /// How long.
        waited: Duration,
        /// For what.
        waiting_for: &'static str,
    },
    /// The engine did not take the weights, and says why. If it said so when no bytes were under way, the
    /// connection still stands and may carry the next update.
    #[error("refused by the engine: {reason}")]
    Refused {
        /// The engine's words, cut to a readable length.
        reason: String,
    },
    /// The trainer gave up, and says why.
    #[error("aborted by the trainer: {reason}")]
    Aborted {
        /// The trainer's words, cut to a readable length.
        reason: String,
    },
    /// The other process does not keep to the protocol.
    #[error(transparent)]
    Violation(Box<ProtocolViolation>),
    /// The trainer's own source failed; the engine was told.
    #[error(transparent)]
    Source(Box<SourceError>),
    /// The trainer's own source delivered another number of bytes than it had listed; the engine was told.
    #[error("{tensor}: {expected_bytes} bytes expected, {received_bytes} received from the source")]
    WrongLength {
        /// The tensor, its name cut to a readable length.
        tensor: String,
        /// Bytes by shape and dtype.
        expected_bytes: u64,
        /// Bytes that came.
        received_bytes: u64,
    },
    /// A message to the other process, in practice a trainer's index, is longer than it may be. It was not
    /// sent.
    #[error("a message of {bytes} bytes, {limit_bytes} at most")]
    MessageTooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// A call that has no place in the order of an update. It did nothing; the connection still stands.
    #[error("{call}: {because}")]
    OutOfTurn {
        /// The method.
        call: &'static str,
        /// Why it can't be called now.
        because: &'static str,
    },
    /// An earlier error ended the connection.
    #[error("the connection was ended by an earlier error")]
    Ended,
}

/// What the other process did against the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolViolation {
    /// A message longer than any that may come now. It was not read.
    #[error("a message of {bytes} bytes where {waiting_for} was expected, {limit_bytes} at most")]
    TooLong {
        /// Length as announced.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
        /// What was to come.
        waiting_for: &'static str,
    },
    /// Not a message: no JSON, no UTF-8, an unknown name, a field too many or too few, a list too long.
    #[error("no valid message where {waiting_for} was expected: {detail}")]
    Malformed {
        /// What was to come.
        waiting_for: &'static str,
        /// What and where, cut to a readable length.
        detail: String,
    },
    /// A message that may not come now.
    #[error("`{received}` where {waiting_for} was expected")]
    Unexpected {
        /// The message's name.
        received: &'static str,
        /// What was to come.
        waiting_for: &'static str,
    },
    /// The engine speaks another version of the protocol.
    #[error("the engine speaks version {version} of the protocol, this is version {supported}")]
    Version {
        /// The engine's.
        version: u32,
        /// Ours.
        supported: u32,
    },
    /// Descriptors came where none belong, or not the one that does.
    #[error("{received} descriptors or more came with a message, expected {expected}")]
    Descriptors {
        /// How many were seen.
        received: usize,
        /// How many belong there.
        expected: usize,
    },
    /// The descriptor is not the memory that the protocol promises.
    #[error("the descriptor is not usable: {fault}")]
    Memory {
        /// What is wrong with it.
        fault: String,
    },
    /// A size of the halves that is not possible.
    #[error("halves of {half_bytes} bytes are not possible")]
    HalfBytes {
        /// The size.
        half_bytes: u64,
    },
    /// Not the half whose turn it is.
    #[error("half {received} out of turn")]
    HalfOutOfTurn {
        /// The half that was named.
        received: u64,
    },
    /// A half that is neither full nor filled with all that is still wanted.
    #[error("half filled with {bytes} bytes; it holds {half_bytes}, and {wanted_bytes} are wanted yet")]
    FilledBytes {
        /// Bytes as announced.
        bytes: u64,
        /// Bytes of a half.
        half_bytes: u64,
        /// Bytes of the wanted tensors that were not announced before.
        wanted_bytes: u64,
    },
    /// The index lists more tensors than a set may have.
    #[error("an index of {tensors} tensors, {limit} at most")]
    TooManyTensors {
        /// How many.
        tensors: usize,
        /// The limit.
        limit: usize,
    },
    /// The index lists a tensor that can't exist.
    #[error("tensor `{tensor}`: {fault}")]
    Tensor {
        /// Its name, cut to a readable length.
        tensor: String,
        /// What is wrong.
        fault: &'static str,
    },
    /// The engine wants what the index doesn't have.
    #[error("tensor {tensor} is wanted, the index has {count}")]
    NoSuchTensor {
        /// The position.
        tensor: u64,
        /// Length of the index.
        count: usize,
    },
}

impl From<ProtocolViolation> for SharedMemoryError {
    fn from(violation: ProtocolViolation) -> Self {
        SharedMemoryError::Violation(Box::new(violation))
    }
}

impl From<SharedMemoryError> for SourceError {
    fn from(error: SharedMemoryError) -> Self {
        SourceError::SharedMemory(Box::new(error))
    }
}
