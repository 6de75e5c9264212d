//! A control call from its receipt to its one answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use dormouse::control::{ControlRequest, ControlResponse, ErrorKind, Operation, Report, TransactionId};
use serde_json::{Map, Value};
use tokio::sync::OwnedSemaphorePermit;

use crate::app::App;
use crate::bodies::{self, Budget, Limits};
use crate::control_answer::Done;
use crate::control_args::{Args, Unique};
use crate::control_weights::never;
use crate::error::{REQUEST_ID, Refusal, START};
use crate::payload::{self, Weights};

/// Longest JSON body.
const MAX_JSON_BYTES: u64 = 1 << 20;
/// Longest name of a call.
const MAX_ID_BYTES: usize = 256;

/// A caller who has the token, if the server asks for one.
#[derive(Debug)]
pub struct Authorized;

impl FromRequestParts<App> for Authorized {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        authorize(&parts.headers, app).map_err(|refusal| refusal.at(app))
    }
}

fn authorize(headers: &HeaderMap, app: &App) -> Result<Authorized, Refusal> {
    let Some(token) = app.token.as_deref() else {
        // Without a token anybody on this machine may call, but not the pages that a browser here shows.
        return if is_foreign(headers) { Err(foreign()) } else { Ok(Authorized) };
    };
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.split_once(' '));
    match given {
        Some((scheme, given)) if scheme.eq_ignore_ascii_case("bearer") && same(given.trim(), token) => {
            Ok(Authorized)
        }
        _ => Err(Refusal::new(
            StatusCode::UNAUTHORIZED,
            "unauthorized",
            "this server asks for a token: Authorization: Bearer ...",
        )),
    }
}

fn foreign() -> Refusal {
    let message = "a server without a token takes no control calls from other sites' pages";
    Refusal::new(StatusCode::FORBIDDEN, "forbidden", message)
}

/// Whether a page of another machine sends this.
fn is_foreign(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let origin = origin.to_str().unwrap_or_default();
    let Some((_, authority)) = origin.split_once("://") else { return true };
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    let loopback = host == "localhost" || address.is_ok_and(|address| address.is_loopback());
    let same = headers.get(header::HOST).is_some_and(|host| host.as_bytes() == authority.as_bytes());
    !loopback && !same
}

/// Compares in a time that doesn't depend on where the two differ.
fn same(given: &str, token: &str) -> bool {
    let differing = given.bytes().zip(token.bytes()).fold(0, |bits, (a, b)| bits | (a ^ b));
    given.len() == token.len() && differing == 0
}

/// A control call: its name, its arguments, and the weights that it brings.
pub struct Call {
    /// What all routes share.
    pub app: App,
    /// Its arguments.
    pub args: Args,
    /// The weights that are its body, if these are what its body is.
    pub weights: Option<Weights>,
    /// Its name: the body's, the header's, or made up.
    id: String,
    deadline: Option<Duration>,
    path: String,
    received: Instant,
    /// The transaction that it belongs to, which is over without its owner's knowing.
    pub lost: Option<TransactionId>,
    /// Held until the answer: weights are in memory until then.
    permit: Option<OwnedSemaphorePermit>,
}

impl FromRequest<App> for Call {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        Self::read(request, app, false).await
    }
}

/// A [`Call`] that may bring weights.
pub struct WeightsCall(pub Call);

impl FromRequest<App> for WeightsCall {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        Call::read(request, app, true).await.map(Self)
    }
}

impl Call {
    async fn read(request: Request, app: &App, weights: bool) -> Result<Self, Refusal> {
        let (parts, body) = request.into_parts();
        authorize(&parts.headers, app).map_err(|refusal| refusal.at(app))?;
        let mut call = Self {
            app: app.clone(),
            args: Args::default(),
            weights: None,
            id: made_up_id(),
            deadline: None,
            path: parts.uri.path().to_owned(),
            received: Instant::now(),
            permit: None,
            lost: None,
        };
        match call.fill(&parts, body, weights).await {
            Ok(()) => Ok(call),
            Err(refusal) => Err(call.refuse(refusal)),
        }
    }

    async fn fill(&mut self, parts: &Parts, body: Body, weights: bool) -> Result<(), Refusal> {
        if let Some(id) = parts.headers.get(REQUEST_ID) {
            self.id = checked_id("X-Request-Id", id.to_str().unwrap_or_default())?;
        }
        self.args = Args::of_query(&parts.uri)?;
        // A body is read for no longer than the call may take, if the query says it.
        let in_query = self.args.has("timeout");
        self.deadline = self.args.timeout()?;
        if weights && !payload::is_json(&parts.headers) {
            self.read_weights(&parts.headers, body).await?;
        } else {
            self.read_arguments(&parts.headers, body).await?;
        }
        self.name_itself()?;
        if in_query && self.args.has("timeout") {
            return Err(Refusal::argument("timeout", "is in the query and in the body"));
        }
        self.deadline = self.args.timeout()?.or(self.deadline);
        Ok(())
    }

    fn name_itself(&mut self) -> Result<(), Refusal> {
        let (request, control) = (self.args.text("request_id")?, self.args.text("control_id")?);
        let (name, id) = match (request, control) {
            (Some(_), Some(_)) => {
                return Err(Refusal::argument("control_id", "is `request_id` by another name"));
            }
            (Some(id), None) => ("request_id", id),
            (None, Some(id)) => ("control_id", id),
            (None, None) => return Ok(()),
        };
        self.id = checked_id(name, &id)?;
        Ok(())
    }

    async fn read_arguments(&mut self, headers: &HeaderMap, body: Body) -> Result<(), Refusal> {
        let patience = self.app.info.patience;
        let limits = self.limits(MAX_JSON_BYTES, patience.body_rate);
        bodies::check_length(headers, limits.bytes)?;
        let mut room = self.app.gates.bodies.room();
        let bytes = bodies::read(body, limits, &mut room).await?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.args.add_body(json_object(&bytes, headers)?)
    }

    async fn read_weights(&mut self, headers: &HeaderMap, body: Body) -> Result<(), Refusal> {
        let limit = payload::limit_bytes(&self.app);
        payload::check_headers(headers, limit)?;
        let length = headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0");
        if length && let Some(refusal) = never(&self.app) {
            return Err(refusal);
        }
        let patience = self.app.info.patience;
        let turn = self.left().unwrap_or(patience.weights_turn);
        let permit = Arc::clone(&self.app.gates.uploads).acquire_owned();
        let Ok(permit) = tokio::time::timeout(turn.min(patience.weights_turn), permit).await else {
            let (kind, message) = match turn <= patience.weights_turn && self.deadline.is_some() {
                true => (ErrorKind::Deadline, "the deadline passed before the body's turn to be read"),
                false => (ErrorKind::Overloaded, "other bodies of weights are being read"),
            };
            return Err(Refusal::of_kind(kind, message));
        };
        self.permit = permit.ok();
        let limits = self.limits(limit, patience.weights_rate);
        // These are counted by their number.
        let mut room = Budget::new(usize::MAX).room();
        let bytes = bodies::read(body, limits, &mut room).await?;
        self.weights = Weights::of_body(bytes, headers)?;
        Ok(())
    }

    fn limits(&self, bytes: u64, rate: u64) -> Limits {
        let until = self.left().and_then(|left| Instant::now().checked_add(left));
        Limits { bytes, idle: self.app.info.patience.body, rate, until }
    }

    fn left(&self) -> Option<Duration> {
        self.deadline.map(|all| all.saturating_sub(self.received.elapsed()))
    }

    /// Carries out what `plan` makes of the arguments, and answers with what `phrase` makes of the outcome.
    pub async fn run(
        self,
        plan: impl FnOnce(&mut Call) -> Result<Vec<Operation>, Refusal>,
        phrase: impl FnOnce(Done) -> Done,
    ) -> Response {
        match self.carry_out(plan).await {
            Ok(responses) => match Done::of(&responses) {
                Some(done) => phrase(done).into_response(),
                None => StatusCode::OK.into_response(),
            },
            Err(refusal) => refusal.into_response(),
        }
    }

    /// Carries out what `plan` makes of the arguments: one operation after another until one fails.
    ///
    /// # Errors
    /// Arguments that mean nothing, of which none is left; the first operation that failed.
    pub async fn carry_out(
        mut self,
        plan: impl FnOnce(&mut Call) -> Result<Vec<Operation>, Refusal>,
    ) -> Result<Vec<ControlResponse>, Refusal> {
        let planned = plan(&mut self).and_then(|steps| {
            std::mem::take(&mut self.args).finish()?;
            Ok(steps)
        });
        let steps = match planned {
            Ok(steps) => steps,
            Err(refusal) => return Err(self.refuse(refusal)),
        };
        // A client that goes away does not stop half of it.
        let work = tokio::spawn(self.steps(steps));
        work.await.unwrap_or_else(|panic| Err(Refusal::of_kind(ErrorKind::Internal, panic.to_string())))
    }

    async fn steps(self, steps: Vec<Operation>) -> Result<Vec<ControlResponse>, Refusal> {
        let mut responses = Vec::with_capacity(steps.len());
        for operation in steps {
            let part_of = transaction_of(&operation);
            let mut request = ControlRequest::new(operation).id(&self.id);
            request.deadline = self.left();
            let response = self.app.handle.control(request).await;
            self.remember(&response);
            if let Some(refusal) = Refusal::of_response(&response) {
                let refusal = self.explained(refusal, part_of, &response);
                return Err(self.named(done_before(refusal, &responses)));
            }
            responses.push(response);
        }
        Ok(responses)
    }

    /// Keeps track of the transaction that was begun here.
    fn remember(&self, response: &ControlResponse) {
        let updates = &self.app.updates;
        match (response.operation, response.report.last()) {
            ("begin", Some(Report::Begun(transaction))) => updates.begun(*transaction),
            ("abandon", Some(Report::Abandoned(transaction))) => updates.aborted(*transaction),
            // Whatever the answer: who asked for the end knows of it.
            ("commit" | "abandon", _) => updates.acknowledged(),
            _ => {}
        }
    }

    /// Says what a failure means for the transaction.
    fn explained(
        &self,
        refusal: Refusal,
        part_of: Option<TransactionId>,
        response: &ControlResponse,
    ) -> Refusal {
        let Some(transaction) = part_of else { return refusal };
        if self.lost.is_some() {
            return refusal.into_conflict(START).about(transaction).state(response.state_after.clone());
        }
        let ended = response.state_before.transaction == Some(transaction)
            && response.state_after.transaction != Some(transaction);
        match ended {
            true => refusal.and(&format!("transaction {transaction} is over")).about(transaction).next(START),
            false => refusal,
        }
    }

    /// How long the call may take, if it says so.
    pub fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// The call's name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Refuses a call that never came to the controller, which logs the others.
    fn refuse(&self, refusal: Refusal) -> Refusal {
        let (status, kind) = (refusal.status().as_u16(), refusal.kind());
        tracing::info!(id = self.id, path = self.path, status, kind, why = refusal.message(), "not taken");
        self.named(refusal)
    }

    /// Names the call in its refusal, and says what state the engine is in.
    fn named(&self, refusal: Refusal) -> Refusal {
        refusal.request_id(&self.id).at(&self.app)
    }
}

/// The transaction that an operation is a part of.
fn transaction_of(operation: &Operation) -> Option<TransactionId> {
    match operation {
        Operation::Push { transaction, .. }
        | Operation::Commit { transaction }
        | Operation::Abandon { transaction } => Some(*transaction),
        _ => None,
    }
}

/// A call that failed half-way says what it did.
fn done_before(refusal: Refusal, responses: &[ControlResponse]) -> Refusal {
    if responses.is_empty() {
        return refusal;
    }
    let done: Vec<_> = responses.iter().map(|response| response.operation).collect();
    refusal.and(&format!("before that, this call has done: {}", done.join(", ")))
}

/// A body of JSON arguments.
fn json_object(bytes: &[u8], headers: &HeaderMap) -> Result<Map<String, Value>, Refusal> {
    if !payload::is_json(headers) && headers.contains_key(header::CONTENT_TYPE) {
        return Err(Refusal::media_type("arguments come as JSON: Content-Type: application/json"));
    }
    match serde_json::from_slice(bytes) {
        Ok(Unique(Value::Object(fields))) => Ok(fields),
        Ok(Unique(_)) => Err(Refusal::argument("body", "must be a JSON object")),
        Err(error) => Err(Refusal::argument("body", format!("is no JSON: {error}"))),
    }
}

/// A caller's name for a call, which is sent back in a header.
fn checked_id(argument: &str, id: &str) -> Result<String, Refusal> {
    let fits = (1..=MAX_ID_BYTES).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    if fits {
        Ok(id.to_owned())
    } else {
        Err(Refusal::argument(argument, "must be 1 to 256 visible ASCII characters"))
    }
}

/// A name for a call that has none; no other call of any server is likely to have it.
fn made_up_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let micros = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros());
    format!("control-{micros:x}-{number}")
}
