//! The trainer's side.

use std::collections::VecDeque;
use std::fmt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::MIN_HALF_BYTES;
use super::channel::Channel;
use super::error::{ProtocolViolation, SharedMemoryError};
use super::message::{
    FromEngine, FromTrainer, Index, MAX_MESSAGE_BYTES, MAX_WANT_BYTES, Message as _, PROTOCOL, readable,
};
use crate::device::{AdoptError, SharedMapping};
use crate::weights::json::cut;
use crate::weights::{SourceError, TensorSpec, WeightSource, WeightVersion};

/// A trainer's connection to an engine in another process (see
/// [`SharedMemorySource`](super::SharedMemorySource)), for any number of updates.
///
/// A client in another language needs a Unix socket and JSON; the protocol is described at the begin of
/// `src/weights/shared_memory.rs`.
///
/// ```no_run
/// use std::time::Duration;
///
/// use dormouse::{Checkpoint, SharedMemoryClient};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut engine = SharedMemoryClient::connect("/run/trainer/weights.socket", Duration::from_secs(60))?;
/// let version = engine.send(&mut Checkpoint::at("path/to/new/weights"))?;
/// println!("the engine has version {version}");
/// # Ok(())
/// # }
/// ```
pub struct SharedMemoryClient {
    /// `None` after an error.
    live: Option<Live>,
}

/// A connection that stands.
struct Live {
    channel: Channel,
    memory: SharedMapping,
    half_bytes: usize,
    /// Halves that the engine hasn't taken yet, the older one first.
    filled: VecDeque<usize>,
}

/// How an update ended.
enum Verdict {
    Committed(WeightVersion),
    Refused(String),
}

impl SharedMemoryClient {
    /// Connects to the socket that the engine's process listens on. Every wait for the engine, here and
    /// later, lasts at most `deadline`.
    ///
    /// # Errors
    /// [`SharedMemoryError::Connect`], and those of [`over`](Self::over).
    pub fn connect(path: impl AsRef<Path>, deadline: Duration) -> Result<Self, SharedMemoryError> {
        let path = path.as_ref();
        let stream = UnixStream::connect(path)
            .map_err(|source| SharedMemoryError::Connect { path: path.to_owned(), source })?;
        Self::over(stream, deadline)
    }

    /// Uses a stream that is connected to the engine's process.
    ///
    /// # Errors
    /// A [`SharedMemoryError`] if the engine doesn't greet in time or not as it should, or if the memory
    /// can't be mapped.
    pub fn over(stream: UnixStream, deadline: Duration) -> Result<Self, SharedMemoryError> {
        let channel = Channel::new(stream, deadline);
        let (memory, half_bytes) = greeted(&channel).map_err(|error| told(&channel, error))?;
        Ok(Self { live: Some(Live { channel, memory, half_bytes, filled: VecDeque::new() }) })
    }

    /// Sends the weights of a source and waits until the engine has committed them; returns the version that
    /// they are now. Only the tensors that the engine asks for are read.
    ///
    /// # Errors
    /// A [`SharedMemoryError`]. The weights are not used, with one exception: after
    /// [`SharedMemoryError::Gone`] and [`SharedMemoryError::Deadline`] the engine may have committed them
    /// and not been able to say so.
    pub fn send(&mut self, source: &mut dyn WeightSource) -> Result<WeightVersion, SharedMemoryError> {
        let mut live = self.live.take().ok_or(SharedMemoryError::Ended)?;
        match live.send(source) {
            Err(error) => Err(told(&live.channel, error)),
            Ok(verdict) => {
                self.live = Some(live);
                match verdict {
                    Verdict::Committed(version) => Ok(version),
                    Verdict::Refused(reason) => Err(SharedMemoryError::Refused { reason }),
                }
            }
        }
    }
}

impl Live {
    fn send(&mut self, source: &mut dyn WeightSource) -> Result<Verdict, SharedMemoryError> {
        let specs = source.index().map_err(failed)?;
        self.channel.send(&FromTrainer::Index(Index::of(&specs, source.unsupported())))?;
        loop {
            let waiting_for = "the engine to want tensors or to decide";
            match self.channel.receive(MAX_WANT_BYTES, waiting_for)? {
                FromEngine::Want { tensors } => {
                    let wanted = positions(&tensors.0, specs.len())?;
                    self.stream(&wanted, &specs, source)?;
                }
                FromEngine::Finish {} => {
                    source.finish().map_err(failed)?;
                    self.channel.send(&FromTrainer::Sent {})?;
                }
                FromEngine::Committed(version) => return Ok(Verdict::Committed(version)),
                FromEngine::Refused { reason } => return Ok(Verdict::Refused(readable(&reason))),
                other => return Err(unexpected(other, waiting_for)),
            }
        }
    }

    /// Sends the bytes of the wanted tensors, and waits until all of them are taken.
    fn stream(
        &mut self,
        wanted: &[usize],
        specs: &[TensorSpec],
        source: &mut dyn WeightSource,
    ) -> Result<(), SharedMemoryError> {
        source.plan(wanted).map_err(failed)?;
        let mut writer = Writer { live: self, half: 0, used: 0, error: None };
        for &tensor in wanted {
            let spec = &specs[tensor];
            let expected_bytes = spec.checked_bytes().map_or(u64::MAX, |bytes| bytes as u64);
            let mut received_bytes = 0;
            let read = source.read(tensor, &mut |piece| {
                received_bytes += piece.len() as u64;
                if received_bytes <= expected_bytes {
                    writer.write(piece);
                }
            });
            // The first of two errors: a source can't know that its bytes are not used any more.
            writer.error.take().map_or(Ok(()), Err)?;
            read.map_err(failed)?;
            if received_bytes != expected_bytes {
                let tensor = cut(&spec.name).into();
                return Err(SharedMemoryError::WrongLength { tensor, expected_bytes, received_bytes });
            }
        }
        writer.announce()?;
        while !self.filled.is_empty() {
            self.wait_taken()?;
        }
        Ok(())
    }

    /// Waits until the engine has taken the older filled half.
    fn wait_taken(&mut self) -> Result<(), SharedMemoryError> {
        let waiting_for = "a half to be taken";
        match self.channel.receive(MAX_MESSAGE_BYTES, waiting_for)? {
            FromEngine::Taken { half } if self.filled.front().is_some_and(|&next| next as u64 == half) => {
                self.filled.pop_front();
                Ok(())
            }
            FromEngine::Taken { half } => Err(ProtocolViolation::HalfOutOfTurn { received: half }.into()),
            other => Err(unexpected(other, waiting_for)),
        }
    }
}

/// Puts a stream of bytes into the halves in turn.
struct Writer<'a> {
    live: &'a mut Live,
    half: usize,
    /// Bytes of the half that are written.
    used: usize,
    /// A source can't be stopped by its sink: after an error nothing is written.
    error: Option<SharedMemoryError>,
}

impl Writer<'_> {
    fn write(&mut self, piece: &[u8]) {
        if self.error.is_none()
            && let Err(error) = self.try_write(piece)
        {
            self.error = Some(error);
        }
    }

    fn try_write(&mut self, mut piece: &[u8]) -> Result<(), SharedMemoryError> {
        while !piece.is_empty() {
            if self.used == 0 {
                while self.live.filled.contains(&self.half) {
                    self.live.wait_taken()?;
                }
            }
            let (now, later) = piece.split_at(piece.len().min(self.live.half_bytes - self.used));
            self.live.memory.write(self.half * self.live.half_bytes + self.used, now);
            self.used += now.len();
            piece = later;
            if self.used == self.live.half_bytes {
                self.announce()?;
            }
        }
        Ok(())
    }

    /// Tells the engine of what the half holds, and goes on to the other one.
    fn announce(&mut self) -> Result<(), SharedMemoryError> {
        if self.used > 0 {
            let filled = FromTrainer::Filled { half: self.half as u64, bytes: self.used as u64 };
            self.live.channel.send(&filled)?;
            self.live.filled.push_back(self.half);
            (self.half, self.used) = (1 - self.half, 0);
        }
        Ok(())
    }
}

/// Receives the greeting and maps the memory that came with it.
fn greeted(channel: &Channel) -> Result<(SharedMapping, usize), SharedMemoryError> {
    let waiting_for = "the engine's welcome";
    let (message, descriptor) = channel.receive_with(waiting_for)?;
    let (protocol, half_bytes, descriptor) = match (message, descriptor) {
        (FromEngine::Welcome { protocol, half_bytes }, Some(descriptor)) => {
            (protocol, half_bytes, descriptor)
        }
        (FromEngine::Welcome { .. }, None) => {
            return Err(ProtocolViolation::Descriptors { received: 0, expected: 1 }.into());
        }
        (other, _) => return Err(unexpected(other, waiting_for)),
    };
    if protocol != PROTOCOL {
        return Err(ProtocolViolation::Version { version: protocol, supported: PROTOCOL }.into());
    }
    let impossible = ProtocolViolation::HalfBytes { half_bytes };
    let half = usize::try_from(half_bytes).ok().filter(|&half| half >= MIN_HALF_BYTES);
    let Some((half, both)) = half.and_then(|half| Some((half, half.checked_mul(2)?))) else {
        return Err(impossible.into());
    };
    match SharedMapping::adopt(descriptor, both) {
        Ok(memory) => Ok((memory, half)),
        Err(AdoptError::Unfit(fault)) => Err(ProtocolViolation::Memory { fault }.into()),
        Err(AdoptError::Device(error)) => Err(error.into()),
    }
}

/// Checks what the engine wants.
fn positions(wanted: &[u64], count: usize) -> Result<Vec<usize>, ProtocolViolation> {
    let listed = |&tensor: &u64| match usize::try_from(tensor) {
        Ok(position) if position < count => Ok(position),
        _ => Err(ProtocolViolation::NoSuchTensor { tensor, count }),
    };
    wanted.iter().map(listed).collect()
}

/// What a message means that is not the expected one.
fn unexpected(message: FromEngine, waiting_for: &'static str) -> SharedMemoryError {
    let received = message.name();
    message.last_word().unwrap_or_else(|| ProtocolViolation::Unexpected { received, waiting_for }.into())
}

/// The error that ends a connection: tells the engine why, or finds out why it is gone.
fn told(channel: &Channel, error: SharedMemoryError) -> SharedMemoryError {
    match error {
        SharedMemoryError::Gone { .. } => channel.last_word::<FromEngine>().unwrap_or(error),
        SharedMemoryError::Refused { .. } => error,
        error => {
            channel.send_last_word(&FromTrainer::Abort { reason: readable(&error.to_string()) });
            error
        }
    }
}

fn failed(error: SourceError) -> SharedMemoryError {
    SharedMemoryError::Source(Box::new(error))
}

impl fmt::Debug for SharedMemoryClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemoryClient")
            .field("half_bytes", &self.live.as_ref().map(|live| live.half_bytes))
            .finish_non_exhaustive()
    }
}
