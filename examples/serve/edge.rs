//! What is true of all routes: an answer reaches its client, and a HEAD does nothing.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures_util::StreamExt as _;
use hyper::body::Frame;

use crate::app::App;
use crate::error::no_such_method;

/// Bytes of a refused body that are read, so that its sender gets to read the answer.
const DRAINED_BYTES: usize = 8 << 20;
/// How long they are waited for.
const DRAINED_FOR: Duration = Duration::from_secs(1);
/// Routes whose GET does something.
const DOING: [&str; 5] = [
    "/clear_load_weight",
    "/update_model_weight",
    "/flush_cache",
    "/get_weights_by_name",
    "/health_generate",
];

/// Around every route.
pub async fn edge(State(app): State<App>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let doing = DOING.contains(&path);
    if doing && request.method() == Method::HEAD {
        let allow = match path {
            "/flush_cache" | "/get_weights_by_name" => "GET,POST",
            _ => "GET",
        };
        let mut refused =
            no_such_method(State(app), Method::HEAD, request.uri().clone()).await.into_response();
        refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
        return refused;
    }
    // A client that waits to be told sends nothing before it is.
    let waits = request.headers().contains_key(header::EXPECT);
    let (parts, body) = request.into_parts();
    let body = Rest(Arc::new(Mutex::new(body)));
    let mut response = next.run(Request::from_parts(parts, Body::new(body.clone()))).await;
    if response.status().is_client_error() || response.status().is_server_error() {
        if !waits && response.status() != StatusCode::REQUEST_TIMEOUT && !body.is_end_stream() {
            // Closed with bytes unread, a connection is reset, and the answer with it.
            let _ = tokio::time::timeout(DRAINED_FOR, drain(body)).await;
        }
        if doing && let Some(allow) = response.headers_mut().get_mut(header::ALLOW) {
            let others = allow.to_str().unwrap_or_default().replace(",HEAD", "");
            *allow = HeaderValue::from_str(&others).unwrap_or(HeaderValue::from_static("GET"));
        }
    }
    response
}

async fn drain(body: Rest) {
    let (mut parts, mut read) = (Body::new(body).into_data_stream(), 0);
    while let Some(Ok(part)) = parts.next().await {
        read += part.len();
        if read > DRAINED_BYTES {
            return;
        }
    }
}

/// A body that a route reads, and this module if the route does not.
#[derive(Clone)]
struct Rest(Arc<Mutex<Body>>);

impl HttpBody for Rest {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut body = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Pin::new(&mut *body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_end_stream()
    }
}
