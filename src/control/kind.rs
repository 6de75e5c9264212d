//! Failures by kind, for callers that decide by it: what a server maps to status codes.

use super::{ControlError, MissingStep, SubmitError};
use crate::device::DeviceError;
use crate::engine::{
    BeginError, CommitError, LoadError, ParkError, RestoreError, SleepError, TensorError, UpdateError,
    VerifyError, WakeError,
};
use crate::request::RequestError;
use crate::weights::{PushError, SourceError, TransferError};

/// What kind of failure an error is, for a caller that decides by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Another step must come first.
    Conflict,
    /// Requests are in flight.
    InFlight,
    /// The caller's arguments mean nothing.
    InvalidArgument,
    /// What was named doesn't exist.
    NotFound,
    /// The weights that were sent are malformed or don't fit.
    InvalidWeights,
    /// Memory is short.
    OutOfMemory,
    /// A deadline passed.
    Deadline,
    /// Too much waits.
    Overloaded,
    /// The engine doesn't serve now.
    NotServing,
    /// The controller has stopped, for good.
    Stopped,
    /// Files or devices failed, or memory was damaged.
    Internal,
}

impl ErrorKind {
    /// Its name for machines.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::InFlight => "requests_in_flight",
            Self::InvalidArgument => "invalid_argument",
            Self::NotFound => "not_found",
            Self::InvalidWeights => "invalid_weights",
            Self::OutOfMemory => "out_of_memory",
            Self::Deadline => "deadline",
            Self::Overloaded => "overloaded",
            Self::NotServing => "not_serving",
            Self::Stopped => "stopped",
            Self::Internal => "internal",
        }
    }

    /// Whether the same call may succeed later, without another call before it.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::InFlight | Self::OutOfMemory | Self::Deadline | Self::Overloaded | Self::NotServing
        )
    }
}

impl SubmitError {
    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotServing { .. } => ErrorKind::NotServing,
            Self::Stopped => ErrorKind::Stopped,
            Self::QueueFull { .. } => ErrorKind::Overloaded,
            Self::Request(RequestError::DuplicateId { .. }) => ErrorKind::Conflict,
            Self::Request(_) => ErrorKind::InvalidArgument,
        }
    }
}

impl ControlError {
    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Conflict { .. } | Self::DuplicateId { .. } => ErrorKind::Conflict,
            Self::InFlight { .. } | Self::Sleep(SleepError::InFlight { .. }) => ErrorKind::InFlight,
            Self::Deadline { .. } | Self::Sleep(SleepError::DrainDeadline { .. }) => ErrorKind::Deadline,
            Self::Tags(_) | Self::InvalidArgument { .. } => ErrorKind::InvalidArgument,
            Self::QueueFull { .. } => ErrorKind::Overloaded,
            Self::UnknownTransaction { .. } | Self::Tensor(TensorError::Unknown { .. }) => {
                ErrorKind::NotFound
            }
            Self::Park(ParkError::Torn { .. })
            | Self::Tensor(TensorError::Torn { .. })
            | Self::Verify(VerifyError::Torn { .. })
            | Self::Wake(WakeError::Torn { .. }) => ErrorKind::Conflict,
            Self::Park(ParkError::NoHostMemory { .. }) | Self::Sleep(SleepError::Park { .. }) => {
                ErrorKind::OutOfMemory
            }
            Self::Park(ParkError::Device(error))
            | Self::Sleep(SleepError::Device(error))
            | Self::Tensor(TensorError::Device(error))
            | Self::Verify(VerifyError::Device(error))
            | Self::Restore(RestoreError::Device(error))
            | Self::Wake(WakeError::Device(error)) => of_device(error),
            Self::Broken { .. } | Self::Sleep(_) | Self::Verify(_) => ErrorKind::Internal,
            Self::Bucket(_) => ErrorKind::InvalidWeights,
            Self::Load(error) => of_load(error),
            Self::Begin(error) => of_begin(error),
            Self::Push(error) => of_push(error),
            Self::Commit(error) => of_commit(error),
            Self::Update(UpdateError::Begin(error)) => of_begin(error),
            Self::Update(UpdateError::Push(error)) => of_push(error),
            Self::Update(UpdateError::Commit(error)) => of_commit(error),
            Self::Stopped => ErrorKind::Stopped,
        }
    }

    /// The step that must come first, if that is what is wrong.
    pub fn missing_step(&self) -> Option<MissingStep> {
        match self {
            Self::Conflict { missing, .. } => Some(*missing),
            _ if self.kind() == ErrorKind::Conflict && !matches!(self, Self::DuplicateId { .. }) => {
                Some(MissingStep::UpdateWeights)
            }
            _ => None,
        }
    }
}

/// What the device lacks may be there another time; what it failed at may not.
fn of_device(error: &DeviceError) -> ErrorKind {
    match error {
        DeviceError::Operation { .. } => ErrorKind::Internal,
        _ => ErrorKind::OutOfMemory,
    }
}

fn of_source(error: &SourceError) -> ErrorKind {
    use std::io::ErrorKind as Io;
    match error {
        SourceError::NoCheckpoint { .. } => ErrorKind::NotFound,
        SourceError::Io { source, .. } => match source.kind() {
            Io::NotFound | Io::NotADirectory => ErrorKind::NotFound,
            // What the path's author can mend.
            Io::InvalidInput | Io::InvalidFilename | Io::IsADirectory | Io::PermissionDenied => {
                ErrorKind::InvalidArgument
            }
            _ => ErrorKind::Internal,
        },
        SourceError::Custom(_) | SourceError::SharedMemory(_) => ErrorKind::Internal,
        _ => ErrorKind::InvalidWeights,
    }
}

fn of_load(error: &LoadError) -> ErrorKind {
    match error {
        LoadError::Begin(error) => of_begin(error),
        LoadError::Source(error) => of_source(error),
        LoadError::Mismatch(_) => ErrorKind::InvalidWeights,
        LoadError::Transfer(error) => of_transfer(error),
        LoadError::Device(error) => of_device(error),
    }
}

fn of_begin(error: &BeginError) -> ErrorKind {
    match error {
        BeginError::LabelTooLong { .. } | BeginError::UnknownTensors { .. } | BeginError::NoTensors => {
            ErrorKind::InvalidArgument
        }
        BeginError::Torn { .. } => ErrorKind::Conflict,
        BeginError::NoRoom { .. } => ErrorKind::OutOfMemory,
        BeginError::Device(error) => of_device(error),
    }
}

fn of_push(error: &PushError) -> ErrorKind {
    match error {
        PushError::Index(error) => of_source(error),
        PushError::Transfer(error) => of_transfer(error),
        PushError::Mismatch(_) | PushError::Piece(_) | PushError::Delta { .. } => ErrorKind::InvalidWeights,
        PushError::NoBase { .. } | PushError::Failed => ErrorKind::Conflict,
    }
}

fn of_transfer(error: &TransferError) -> ErrorKind {
    match error {
        TransferError::Source(error) => of_source(error),
        TransferError::Device(error) => of_device(error),
        _ => ErrorKind::InvalidWeights,
    }
}

fn of_commit(error: &CommitError) -> ErrorKind {
    match error {
        CommitError::Mismatch(_) => ErrorKind::InvalidWeights,
        CommitError::Transfer(error) => of_transfer(error),
        CommitError::PushFailed => ErrorKind::Conflict,
        CommitError::Device(error) => of_device(error),
    }
}
