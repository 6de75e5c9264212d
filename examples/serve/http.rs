//! Connections and bodies: nobody who is slow, idle or sends too much keeps others waiting.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::future::{Either, select};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::app::{App, router};
use crate::bodies::{self, Limits, ReadError, Room};
use crate::openai::ApiError;

/// Longest body of a request that generates.
pub const GENERATION_BYTES: usize = 10 << 20;
/// Bodies from this length on are worked on by a thread of their own.
const LONG_BYTES: usize = 32 << 10;

/// How patient a server is.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the head of a request, from its connection or the end of the last one's answer.
    pub head: Duration,
    /// For the next part of a body.
    pub body: Duration,
    /// Bytes in a second that a body comes with at least, once `body` has passed: nobody holds a place by a
    /// byte now and then.
    pub body_rate: u64,
    /// The same for a body of weights, of which few are taken at once.
    pub weights_rate: u64,
    /// For a place among the bodies of weights that are read at once.
    pub weights_turn: Duration,
    /// For the client to take what was sent, and to read what waits to be sent.
    pub read: Duration,
    /// Most connections; more wait to be accepted.
    pub connections: usize,
}

impl Default for Patience {
    fn default() -> Self {
        let (soon, later) = (Duration::from_secs(30), Duration::from_secs(120));
        Self {
            head: soon,
            body: soon,
            body_rate: 64 << 10,
            weights_rate: 1 << 20,
            weights_turn: later,
            read: later,
            connections: 8192,
        }
    }
}

/// Serves until `stop`; then accepts nothing, and returns what waits for the open connections to finish their
/// answers.
pub async fn serve(listener: TcpListener, app: App, stop: impl Future<Output = ()>) -> GracefulShutdown {
    let patience = app.info.patience;
    let service = TowerToHyperService::new(router(app));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(patience.head);
    let connections = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(patience.connections));
    let mut stop = pin!(stop);
    loop {
        let next = async {
            let slot = Arc::clone(&slots).acquire_owned().await;
            (slot, listener.accept().await)
        };
        let (slot, accepted) = match select(pin!(next), &mut stop).await {
            Either::Left((next, _)) => next,
            Either::Right(_) => return connections,
        };
        let Ok((stream, _)) = accepted else {
            // Too many open files, or a client that is gone again: neither is a reason to stop.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        // Pieces of a stream are small and should not wait for each other.
        let _ = stream.set_nodelay(true);
        give_up_after(&stream, patience.read);
        let connection = builder.serve_connection(TokioIo::new(stream), service.clone());
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            // A client that breaks off is nobody's failure.
            let _ = connection.await;
            drop(slot);
        });
    }
}

/// Breaks a connection whose other end reads nothing for so long: its request would stay live.
fn give_up_after(stream: &TcpStream, patience: Duration) {
    #[cfg(target_os = "linux")]
    {
        let milliseconds = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
        let _ = rustix::net::sockopt::set_tcp_user_timeout(stream, milliseconds);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (stream, patience);
}

/// A body of JSON, and the room that it takes.
pub struct Json {
    bytes: Bytes,
    _room: Room,
}

/// Reads a body of JSON; one that says it is too long is not begun.
///
/// # Errors
/// 413, 415, 408, 503 if too many others are in memory, or 400 for one that broke off.
pub async fn read_json(app: &App, request: Request, limit: usize) -> Result<Json, ApiError> {
    check_type(request.headers())?;
    let patience = app.info.patience;
    let mut room = app.gates.bodies.room();
    let limits = Limits { bytes: limit as u64, idle: patience.body, rate: patience.body_rate, until: None };
    bodies::check_length(request.headers(), limits.bytes)?;
    let bytes = bodies::read(request.into_body(), limits, &mut room).await?;
    Ok(Json { bytes, _room: room })
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let kind = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "the body must be application/json";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).closing())
}

impl From<ReadError> for ApiError {
    fn from(error: ReadError) -> Self {
        let api = Self::new(error.status(), error.to_string()).code(error.kind());
        match error {
            ReadError::NoRoom => api.retry_after(Duration::from_secs(1)).closing(),
            _ => api.closing(),
        }
    }
}

/// Does what may take long for a body: parsing, templates, tokenisation. Long bodies have threads of their own, not
/// more at once than there are cores.
///
/// # Errors
/// What `work` fails with.
pub async fn think<T: Send + 'static>(
    app: &App,
    body: Json,
    work: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.bytes.len() < LONG_BYTES {
        return work(&body.bytes);
    }
    let turn = Arc::clone(&app.gates.thinking).acquire_owned().await;
    // Both are held to the end of the work, also when the client has left.
    let work = move || {
        let _turn = turn;
        work(&body.bytes)
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the request was not read: {error}")))
    })
}
