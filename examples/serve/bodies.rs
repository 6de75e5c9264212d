//! Bodies on their way into memory: how long, how slow and how many at once.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt as _;
use tokio::sync::Semaphore;

/// Bytes of bodies of requests that generate, in memory at once.
pub const GENERATION_ROOM: usize = 256 << 20;
/// Bodies of weights in memory at once.
const UPLOADS: usize = 2;

/// What keeps a server from taking in more than it can hold.
pub struct Gates {
    /// Memory for bodies of requests that generate.
    pub bodies: Budget,
    /// Turns of work on long bodies, one for each core.
    pub thinking: Arc<Semaphore>,
    /// Turns of bodies of weights.
    pub uploads: Arc<Semaphore>,
}

impl Default for Gates {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            bodies: Budget::new(GENERATION_ROOM),
            thinking: Arc::new(Semaphore::new(cores)),
            uploads: Arc::new(Semaphore::new(UPLOADS)),
        }
    }
}

/// Bytes that may be taken, by anyone.
#[derive(Clone)]
pub struct Budget(Arc<AtomicUsize>);

impl Budget {
    /// So many bytes.
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(bytes)))
    }

    /// Nothing yet, of this budget.
    pub fn room(&self) -> Room {
        Room { budget: self.clone(), taken: 0 }
    }
}

/// A part of a budget, given back at its end.
pub struct Room {
    budget: Budget,
    taken: usize,
}

impl Room {
    /// Takes more; whether there was so much.
    fn take(&mut self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        let taken = self.budget.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        self.taken += if taken { bytes } else { 0 };
        taken
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.taken, Ordering::Relaxed);
    }
}

/// What a body may be like.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most bytes.
    pub bytes: u64,
    /// How long it may stand still.
    pub idle: Duration,
    /// Bytes in a second, at least, after as long as it may stand still.
    pub rate: u64,
    /// When it must be there.
    pub until: Option<Instant>,
}

/// Why a body was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is too long.
    #[error("the body is longer than {limit} bytes")]
    TooLong {
        /// Most bytes.
        limit: u64,
    },
    /// The client went away, or what came was no body.
    #[error("body: broke off")]
    BrokeOff,
    /// It stood still, or came too slowly.
    #[error("the body stopped coming, or came too slowly")]
    Slow,
    /// The caller's time is over.
    #[error("the deadline passed while the body came")]
    Late,
    /// Too much of others' is in memory.
    #[error("too many long bodies are being read: ask again")]
    NoRoom,
}

impl ReadError {
    /// The status that says so.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::TooLong { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BrokeOff => StatusCode::BAD_REQUEST,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Late => StatusCode::GATEWAY_TIMEOUT,
            Self::NoRoom => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Its name for machines.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::TooLong { .. } => "payload_too_large",
            Self::BrokeOff => "invalid_argument",
            Self::Slow => "request_timeout",
            Self::Late => "deadline",
            Self::NoRoom => "overloaded",
        }
    }
}

/// Refuses a body that says it is too long.
///
/// # Errors
/// [`ReadError::TooLong`].
pub fn check_length(headers: &HeaderMap, limit: u64) -> Result<(), ReadError> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: u64| length > limit) { Err(ReadError::TooLong { limit }) } else { Ok(()) }
}

/// Reads a whole body.
///
/// # Errors
/// It is too long, too slow, or breaks off.
pub async fn read(body: Body, limits: Limits, room: &mut Room) -> Result<Bytes, ReadError> {
    let began = Instant::now();
    let mut parts = pin!(body.into_data_stream());
    let (mut first, mut whole) = (Bytes::new(), Vec::new());
    loop {
        let length = first.len() + whole.len();
        let earned = Duration::from_secs(length as u64 / limits.rate.max(1));
        let patience = limits.idle.min((limits.idle + earned).saturating_sub(began.elapsed()));
        let left = limits.until.map(|until| until.saturating_duration_since(Instant::now()));
        let wait = left.unwrap_or(patience).min(patience);
        let part = match tokio::time::timeout(wait, parts.next()).await {
            Err(_) if left.is_some_and(|left| left <= patience) => return Err(ReadError::Late),
            Err(_) => return Err(ReadError::Slow),
            // A body of one part is not copied.
            Ok(None) if whole.is_empty() => return Ok(first),
            Ok(None) => return Ok(whole.into()),
            Ok(Some(Err(_))) => return Err(ReadError::BrokeOff),
            Ok(Some(Ok(part))) => part,
        };
        if (length + part.len()) as u64 > limits.bytes {
            return Err(ReadError::TooLong { limit: limits.bytes });
        }
        if !room.take(part.len()) {
            return Err(ReadError::NoRoom);
        }
        if length == 0 {
            first = part;
        } else {
            whole.extend_from_slice(&std::mem::take(&mut first));
            whole.extend_from_slice(&part);
        }
    }
}
