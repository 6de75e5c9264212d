//! The engine's side.

use std::collections::VecDeque;
use std::fmt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::channel::Channel;
use super::error::{ProtocolViolation, SharedMemoryError};
use super::message::{
    FromEngine, FromTrainer, MAX_INDEX_BYTES, MAX_MESSAGE_BYTES, Message as _, PROTOCOL, readable,
};
use super::{MIN_HALF_BYTES, SharedMemoryOptions};
use crate::device::{DeviceError, SharedMemory};
use crate::weights::json::Bounded;
use crate::weights::{SourceError, TensorSpec, UnsupportedTensor, WeightSource, WeightVersion};

/// Most bytes that are copied out and handed on at a time: few enough for a processor's own cache.
const WINDOW_BYTES: usize = 256 << 10;

/// The tensors of a trainer in another process, which sends them through shared memory (see
/// [`SharedMemoryClient`](super::SharedMemoryClient)).
///
/// One connection carries any number of updates. Each of them is a load from this source, after which the
/// trainer is told: [`confirm`](Self::confirm) with the version it became, or [`refuse`](Self::refuse) with
/// the reason why it is none. A trainer that is told nothing before the source is dropped gets
/// [`SharedMemoryError::Gone`].
///
/// ```no_run
/// use std::os::unix::net::UnixListener;
///
/// use dormouse::{Engine, KvCapacity, SharedMemoryOptions, SharedMemorySource, SleepOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let engine = Engine::builder("path/to/model").kv_cache(KvCapacity::Bytes(1 << 30)).build()?;
/// let listener = UnixListener::bind("/run/trainer/weights.socket")?;
/// let (stream, _) = listener.accept()?;
/// let mut source = SharedMemorySource::accept(stream, SharedMemoryOptions::default())?;
///
/// let asleep = engine.sleep_discarding(SleepOptions::default())?;
/// let loaded = match asleep.load_weights(&mut source) {
///     Ok(loaded) => loaded,
///     Err(failed) => {
///         // Fails too if the trainer is the one that failed.
///         let _ = source.refuse(&failed.error);
///         return Err(failed.error.into());
///     }
/// };
/// source.confirm(&loaded.report().version)?;
/// # Ok(())
/// # }
/// ```
///
/// Whoever may write the memory can't do more than spoil its own update: everything the trainer says is
/// checked, the memory can't shrink, and what is digested is a private copy. Every wait ends at the deadline
/// of the options. After an error other than [`SharedMemoryError::OutOfTurn`] the connection is closed and
/// its memory given back; later calls return [`SharedMemoryError::Ended`].
pub struct SharedMemorySource {
    /// `None` after an error.
    live: Option<Live>,
    unsupported: Vec<UnsupportedTensor>,
}

/// A connection that stands.
struct Live {
    channel: Channel,
    memory: SharedMemory,
    half_bytes: usize,
    phase: Phase,
    /// Bytes of each tensor of the index.
    sizes: Vec<usize>,
    /// Tensors that the trainer was asked for and that weren't read yet.
    planned: VecDeque<usize>,
    /// Bytes of them that no half was filled with yet.
    wanted_bytes: u64,
    /// The half that is read, or was read last.
    half: Half,
    /// The private copy that is handed on.
    window: Vec<u8>,
}

/// Where an update stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No update.
    Idle,
    /// The index is there.
    Listed,
    /// All was read and the trainer stands by it.
    Sent,
}

/// What a half holds.
#[derive(Debug, Clone, Copy)]
struct Half {
    number: usize,
    filled: usize,
    read: usize,
}

/// As if half 1 had just been read: half 0 comes next.
const BEFORE_FIRST: Half = Half { number: 1, filled: 0, read: 0 };

impl SharedMemorySource {
    /// Greets a trainer that has connected, and passes it the memory. Waits for nothing that it says.
    ///
    /// # Errors
    /// [`SharedMemoryError::HalfTooSmall`], [`SharedMemoryError::Memory`] if the system hasn't 2 ·
    /// [`half_bytes`](SharedMemoryOptions::half_bytes), or an error of the socket; the stream is closed then.
    pub fn accept(stream: UnixStream, options: SharedMemoryOptions) -> Result<Self, SharedMemoryError> {
        let SharedMemoryOptions { half_bytes, deadline } = options;
        if half_bytes < MIN_HALF_BYTES {
            return Err(SharedMemoryError::HalfTooSmall { half_bytes, min_bytes: MIN_HALF_BYTES });
        }
        let too_large = DeviceError::AddressSpace { label: "shared memory", bytes: half_bytes as u64 };
        let channel = Channel::new(stream, deadline);
        let memory = half_bytes.checked_mul(2).ok_or(too_large).and_then(SharedMemory::create);
        let memory = memory.inspect_err(|error| channel.send_last_word(&refusal(error)))?;
        let welcome = FromEngine::Welcome { protocol: PROTOCOL, half_bytes: half_bytes as u64 };
        channel.send_with(&welcome, memory.descriptor())?;
        let live = Live {
            channel,
            memory,
            half_bytes,
            phase: Phase::Idle,
            sizes: Vec::new(),
            planned: VecDeque::new(),
            wanted_bytes: 0,
            half: BEFORE_FIRST,
            window: vec![0; half_bytes.min(WINDOW_BYTES)],
        };
        Ok(Self { live: Some(live), unsupported: Vec::new() })
    }

    /// Waits until the trainer says something, at most for `limit`; false if it didn't. A load that begins
    /// then doesn't wait for the trainer to have new weights. That the trainer went away is something, too:
    /// the load tells.
    ///
    /// # Errors
    /// [`SharedMemoryError::Ended`], or an error of the socket.
    pub fn wait_for_offer(&mut self, limit: Duration) -> Result<bool, SharedMemoryError> {
        self.run(|live| live.channel.readable_within(limit))
    }

    /// Tells the trainer that its weights were committed, and as which version. The next load takes its next
    /// update.
    ///
    /// # Errors
    /// [`SharedMemoryError::OutOfTurn`] unless a load from this source was finished before, or an error of
    /// the connection. The weights are committed anyway; only the trainer doesn't know.
    pub fn confirm(&mut self, version: &WeightVersion) -> Result<(), SharedMemoryError> {
        self.run(|live| {
            if live.phase != Phase::Sent {
                return Err(out_of_turn("confirm", "no finished load is there to be confirmed"));
            }
            live.channel.send(&FromEngine::Committed(version.clone()))?;
            live.end_update();
            Ok(())
        })
    }

    /// Tells the trainer that its weights were not taken, in words for it to report, such as the load's
    /// error. The connection then stands for its next update, unless bytes were still under way.
    ///
    /// # Errors
    /// [`SharedMemoryError::OutOfTurn`] if no update was begun, or an error of the connection, among them
    /// [`SharedMemoryError::Ended`] if the connection itself was what failed.
    pub fn refuse(&mut self, reason: impl fmt::Display) -> Result<(), SharedMemoryError> {
        let under_way = self.run(|live| {
            if live.phase == Phase::Idle {
                return Err(out_of_turn("refuse", "no update was begun"));
            }
            live.channel.send(&refusal(&reason))?;
            let under_way = !live.planned.is_empty();
            live.end_update();
            Ok(under_way)
        })?;
        if under_way {
            self.live = None;
        }
        Ok(())
    }

    /// Runs `act` on a connection that stands. It doesn't any more after an error, or if `act` panics.
    fn run<T>(
        &mut self,
        act: impl FnOnce(&mut Live) -> Result<T, SharedMemoryError>,
    ) -> Result<T, SharedMemoryError> {
        let mut live = self.live.take().ok_or(SharedMemoryError::Ended)?;
        match act(&mut live) {
            Err(error @ SharedMemoryError::OutOfTurn { .. }) => {
                self.live = Some(live);
                Err(error)
            }
            Err(error) => Err(live.end(error)),
            Ok(result) => {
                self.live = Some(live);
                Ok(result)
            }
        }
    }
}

impl WeightSource for SharedMemorySource {
    /// Waits for the trainer's next update.
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.unsupported = Vec::new();
        let (specs, unsupported) = self.run(Live::index)?;
        self.unsupported = unsupported;
        Ok(specs)
    }

    fn unsupported(&self) -> &[UnsupportedTensor] {
        &self.unsupported
    }

    /// Asks the trainer for the tensors, which may fill both halves from now on.
    ///
    /// # Errors
    /// [`SourceError::NoSuchTensor`], with nothing asked for, or [`SourceError::SharedMemory`].
    fn plan(&mut self, tensors: &[usize]) -> Result<(), SourceError> {
        if let Some(live) = &self.live {
            tensors.iter().try_for_each(|&tensor| live.check_listed(tensor))?;
        }
        Ok(self.run(|live| live.plan(tensors))?)
    }

    /// Hands over a tensor in pieces of at most 256 KiB. Without a [`plan`](WeightSource::plan) the trainer
    /// is asked for this one tensor, and nothing is fetched ahead.
    ///
    /// # Errors
    /// [`SourceError::NoSuchTensor`], with nothing asked for, or [`SourceError::SharedMemory`].
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        if let Some(live) = &self.live {
            live.check_listed(tensor)?;
        }
        Ok(self.run(|live| live.read(tensor, sink))?)
    }

    /// Makes sure that the trainer stands by what it sent. It waits for
    /// [`confirm`](SharedMemorySource::confirm) or [`refuse`](SharedMemorySource::refuse) from then on.
    ///
    /// # Errors
    /// [`SourceError::SharedMemory`].
    fn finish(&mut self) -> Result<(), SourceError> {
        Ok(self.run(Live::finish)?)
    }
}

impl Live {
    fn index(&mut self) -> Result<(Vec<TensorSpec>, Vec<UnsupportedTensor>), SharedMemoryError> {
        if self.phase != Phase::Idle {
            return Err(out_of_turn("index", "the last update was neither confirmed nor refused"));
        }
        let waiting_for = "an index of tensors";
        let index = match self.channel.receive(MAX_INDEX_BYTES, waiting_for)? {
            FromTrainer::Index(index) => index,
            other => return Err(unexpected(other, waiting_for)),
        };
        let (specs, unsupported) = index.into_specs()?;
        self.sizes = specs.iter().map(|spec| spec.checked_bytes().unwrap_or(usize::MAX)).collect();
        self.phase = Phase::Listed;
        Ok((specs, unsupported))
    }

    fn check_listed(&self, tensor: usize) -> Result<(), SourceError> {
        let count = self.sizes.len();
        if tensor < count { Ok(()) } else { Err(SourceError::NoSuchTensor { tensor, count }) }
    }

    fn plan(&mut self, tensors: &[usize]) -> Result<(), SharedMemoryError> {
        if self.phase != Phase::Listed || !self.planned.is_empty() {
            return Err(out_of_turn(
                "plan",
                "there is no index, or tensors of an earlier plan are not read yet",
            ));
        }
        if tensors.is_empty() {
            return Ok(());
        }
        // No sum of sizes of listed tensors that memory could hold overflows; others never end.
        let bytes = tensors.iter().fold(0, |sum: u64, &tensor| sum.saturating_add(self.sizes[tensor] as u64));
        let positions = tensors.iter().map(|&tensor| tensor as u64).collect();
        self.channel.send(&FromEngine::Want { tensors: Bounded(positions) })?;
        self.planned = tensors.iter().copied().collect();
        self.wanted_bytes = bytes;
        self.half = BEFORE_FIRST;
        Ok(())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SharedMemoryError> {
        match self.planned.front() {
            Some(&next) if next == tensor => {}
            Some(_) => return Err(out_of_turn("read", "another tensor is next by the plan")),
            None => self.plan(&[tensor])?,
        }
        let mut left = self.sizes[tensor];
        while left > 0 {
            if self.half.read == self.half.filled {
                self.next_half()?;
            }
            let bytes = left.min(self.half.filled - self.half.read).min(self.window.len());
            let window = &mut self.window[..bytes];
            self.memory.read(self.half.number * self.half_bytes + self.half.read, window)?;
            self.half.read += bytes;
            left -= bytes;
            if self.half.read == self.half.filled {
                // Everything of it is copied: the trainer may go on while this copy is used.
                self.channel.send(&FromEngine::Taken { half: self.half.number as u64 })?;
            }
            sink(&self.window[..bytes]);
        }
        self.planned.pop_front();
        Ok(())
    }

    /// Waits until the other half is filled.
    fn next_half(&mut self) -> Result<(), SharedMemoryError> {
        let waiting_for = "a filled half";
        let (half, bytes) = match self.channel.receive(MAX_MESSAGE_BYTES, waiting_for)? {
            FromTrainer::Filled { half, bytes } => (half, bytes),
            other => return Err(unexpected(other, waiting_for)),
        };
        let number = 1 - self.half.number;
        if half != number as u64 {
            return Err(ProtocolViolation::HalfOutOfTurn { received: half }.into());
        }
        let (half_bytes, wanted_bytes) = (self.half_bytes as u64, self.wanted_bytes);
        // Full, so that a trainer can't draw an update out with one byte after the other.
        let filled =
            usize::try_from(bytes).ok().filter(|_| bytes > 0 && bytes == half_bytes.min(wanted_bytes));
        let filled = filled.ok_or(ProtocolViolation::FilledBytes { bytes, half_bytes, wanted_bytes })?;
        self.wanted_bytes -= bytes;
        self.half = Half { number, filled, read: 0 };
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SharedMemoryError> {
        if self.phase != Phase::Listed || !self.planned.is_empty() {
            return Err(out_of_turn("finish", "there is no index, or tensors of the plan are not read yet"));
        }
        self.channel.send(&FromEngine::Finish {})?;
        let waiting_for = "the trainer's word that all was sent";
        match self.channel.receive(MAX_MESSAGE_BYTES, waiting_for)? {
            FromTrainer::Sent {} => {
                self.phase = Phase::Sent;
                Ok(())
            }
            other => Err(unexpected(other, waiting_for)),
        }
    }

    fn end_update(&mut self) {
        self.phase = Phase::Idle;
        self.sizes = Vec::new();
    }

    /// Closes the connection after an error; tells the trainer why, or finds out why it is gone.
    fn end(self, error: SharedMemoryError) -> SharedMemoryError {
        match error {
            SharedMemoryError::Gone { .. } => self.channel.last_word::<FromTrainer>().unwrap_or(error),
            SharedMemoryError::Aborted { .. } => error,
            error => {
                self.channel.send_last_word(&refusal(&error));
                error
            }
        }
    }
}

/// What a message means that is not the expected one.
fn unexpected(message: FromTrainer, waiting_for: &'static str) -> SharedMemoryError {
    let received = message.name();
    message.last_word().unwrap_or_else(|| ProtocolViolation::Unexpected { received, waiting_for }.into())
}

fn refusal(reason: &impl fmt::Display) -> FromEngine {
    FromEngine::Refused { reason: readable(&reason.to_string()) }
}

fn out_of_turn(call: &'static str, because: &'static str) -> SharedMemoryError {
    SharedMemoryError::OutOfTurn { call, because }
}

impl fmt::Debug for SharedMemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let live = self.live.as_ref();
        f.debug_struct("SharedMemorySource")
            .field("phase", &live.map(|live| live.phase))
            .field("half_bytes", &live.map(|live| live.half_bytes))
            .finish_non_exhaustive()
    }
}
