//! New weights, in every dialect: from a path on this machine, from the body, or call by call in a transaction.
//!
//! A call belongs to a transaction if it names it with `transaction`, or, as vLLM's clients do, carries
//! `update_info`: that joins the open one. Any other call is an update in one go, and is refused while a transaction
//! is open.

use std::convert::identity;
use std::path::{Path, PathBuf};

use axum::response::Response;
use dormouse::control::{AbortTarget, ControlState, ErrorKind, Lifecycle, Operation, Payload, TransactionId};
use dormouse::{Checkpoint, UpdateMode, UpdateOptions, WeightsDigest};
use serde_json::Value;

use crate::app::App;
use crate::control_args::Args;
use crate::control_call::{Call, WeightsCall};
use crate::error::{FINISH, Refusal, SLEEP_KV_CACHE, START, WAKE_WEIGHTS};
use crate::payload::refuse_pickled;

/// Longest path.
const MAX_PATH_BYTES: usize = 4096;
/// What other servers take, and this one does not.
pub const PICKLED: [&str; 2] = ["serialized_named_tensors", "ipc_handles_pickled"];
/// What a checkpoint begins with.
const FILES: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// Weights from a path or from the body.
pub async fn update(WeightsCall(call): WeightsCall) -> Response {
    call.run(|call| bring(call, true), identity).await
}

/// SGLang's update from a path.
pub async fn from_disk(call: Call) -> Response {
    let plan = |call: &mut Call| {
        if !call.args.has("model_path") {
            return Err(Refusal::argument("model_path", "must be the path of a directory"));
        }
        bring(call, false)
    };
    call.run(plan, |done| done.with("num_paused_requests", 0)).await
}

/// SGLang's update from the body.
pub async fn from_tensor(WeightsCall(call): WeightsCall) -> Response {
    let plan = |call: &mut Call| {
        if call.weights.is_none() {
            refuse_other_formats(&mut call.args)?;
            return Err(Refusal::argument("body", "must be a safetensors file or a bucket"));
        }
        bring(call, false)
    };
    call.run(plan, identity).await
}

/// Begins a transaction: nothing changes before its end.
pub async fn start(call: Call) -> Response {
    let plan = |call: &mut Call| {
        // All weights come in the layout of checkpoints.
        if call.args.flag("is_checkpoint_format")? == Some(false) {
            return Err(Refusal::argument("is_checkpoint_format", "must be true"));
        }
        Ok(vec![Operation::Begin { options: options(&mut call.args)?, idle: None }])
    };
    call.run(plan, |done| done.with_result("transaction")).await
}

/// Ends a transaction: all that came is current, or nothing is.
pub async fn finish(call: Call) -> Response {
    let plan = |call: &mut Call| {
        if call.args.has("weight_version") {
            let requirement = "the version is named at /start_weight_update";
            return Err(Refusal::argument("weight_version", requirement));
        }
        Ok(vec![Operation::Commit { transaction: the_transaction(call)? }])
    };
    call.run(plan, identity).await
}

/// Drops what came in a transaction.
pub async fn abort(call: Call) -> Response {
    let plan = |call: &mut Call| Ok(vec![Operation::Abandon { transaction: the_transaction(call)? }]);
    call.run(plan, identity).await
}

/// The steps that bring a call's weights; `either`: the route may be a part of a transaction without naming it.
fn bring(call: &mut Call, either: bool) -> Result<Vec<Operation>, Refusal> {
    let mut steps = Vec::new();
    if call.args.flag("abort_all_requests")?.unwrap_or_default() {
        // An update that can't be must not have ended anything.
        if let Some(refusal) = never(&call.app) {
            return Err(refusal);
        }
        steps.push(Operation::Abort(AbortTarget::All));
    }
    passed_over(&mut call.args)?;
    let vllms = call.args.has("update_info");
    let weights = source(call)?;
    steps.push(match pushed_to(call, either, vllms)? {
        Some(transaction) => Operation::Push { transaction, weights },
        None => Operation::UpdateWeights { weights, options: options(&mut call.args)? },
    });
    Ok(steps)
}

/// SGLang's arguments that ask for nothing that is not so anyway: no KV outlives its weights, and there are
/// no graphs to capture and no allocator's cache.
fn passed_over(args: &mut Args) -> Result<(), Refusal> {
    for name in ["flush_cache", "torch_empty_cache", "recapture_cuda_graph"] {
        args.flag(name)?;
    }
    args.word("load_format", &["auto", "safetensors", "flattened_bucket"])?;
    Ok(())
}

/// Where the weights are.
fn source(call: &mut Call) -> Result<Payload, Refusal> {
    if let Some(weights) = call.weights.take() {
        if call.args.has("model_path") {
            return Err(Refusal::argument("model_path", "the weights are in the body"));
        }
        return Ok(weights.into_payload());
    }
    refuse_other_formats(&mut call.args)?;
    if let Some(info) = call.args.json("update_info")? {
        // vLLM's callers put their arguments in there.
        let Value::Object(info) = info else {
            return Err(Refusal::argument("update_info", "must be a JSON object"));
        };
        call.args.add_body(info)?;
    }
    match call.args.text("model_path")? {
        Some(path) => checkpoint(&call.app, &path),
        None => {
            Err(Refusal::argument("model_path", "must be a path on this machine, or the body the weights"))
        }
    }
}

/// Names what other servers take and this one does not.
fn refuse_other_formats(args: &mut Args) -> Result<(), Refusal> {
    for name in PICKLED {
        if args.has(name) {
            return Err(refuse_pickled(name));
        }
    }
    Ok(())
}

/// A directory of this machine; below the root, if the server has one.
fn checkpoint(app: &App, path: &str) -> Result<Payload, Refusal> {
    let wrong = |requirement: &str| Refusal::argument("model_path", requirement);
    if path.is_empty() || path.len() > MAX_PATH_BYTES || path.contains(char::is_control) {
        return Err(wrong("must be a path of 1 to 4096 bytes without control characters"));
    }
    let outside = || wrong("must be below the directory that the server takes weights from");
    let directory: PathBuf = match app.weights_root.as_deref() {
        None => path.into(),
        // Without asking the file system: whether something outside exists is nobody's business.
        Some(_) if Path::new(path).components().any(|part| part == std::path::Component::ParentDir) => {
            return Err(outside());
        }
        Some(root) => root.join(path),
    };
    if app.weights_root.as_deref().is_some_and(|root| !directory.starts_with(root)) {
        return Err(outside());
    }
    let directory = directory.canonicalize().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Refusal::of_kind(ErrorKind::NotFound, "model_path: there is no such directory")
        }
        kind => wrong(&format!("can't be used: {kind}")),
    })?;
    if app.weights_root.as_deref().is_some_and(|root| !directory.starts_with(root)) {
        return Err(outside());
    }
    let special = |file: &str| std::fs::metadata(directory.join(file)).is_ok_and(|file| !file.is_file());
    match directory.is_dir() {
        false => Err(wrong("must be a directory")),
        // A pipe would be waited for.
        true if FILES.into_iter().any(special) => Err(wrong("must hold weights in regular files")),
        true if !Checkpoint::exists(&directory) => {
            let message = "model_path: no model.safetensors and no index of shards is there";
            Err(Refusal::of_kind(ErrorKind::NotFound, message))
        }
        true => Ok(Payload::source(Checkpoint::at(directory))),
    }
}

/// The caller's name for the weights: FastDeploy says `version`, SGLang and vLLM `weight_version`.
///
/// # Errors
/// It is no text.
pub fn label(args: &mut Args) -> Result<Option<String>, Refusal> {
    let (version, weight_version) = (args.text("version")?, args.text("weight_version")?);
    match (version, weight_version) {
        (Some(_), Some(_)) => Err(Refusal::argument("weight_version", "is `version` by another name")),
        (version, weight_version) => Ok(version.or(weight_version)),
    }
}

/// What an update accepts and checks.
fn options(args: &mut Args) -> Result<UpdateOptions, Refusal> {
    let mut options = UpdateOptions::default();
    options.load.label = label(args)?.map(Into::into);
    if let Some(digest) = args.text("expected_digest")? {
        let digest: Result<WeightsDigest, _> = digest.parse();
        options.load.expected_digest =
            Some(digest.map_err(|error| Refusal::argument("expected_digest", error))?);
    }
    options.load.require_finite = args.flag("require_finite")?.unwrap_or_default();
    options.load.convert_dtypes = args.flag("convert_dtypes")?.unwrap_or_default();
    if args.flag("in_place")?.unwrap_or_default() {
        options.mode = UpdateMode::InPlace;
    }
    options.partial = args.texts("names")?;
    Ok(options)
}

/// The transaction that a call's weights belong to, if any; see the module.
fn pushed_to(call: &mut Call, either: bool, vllms: bool) -> Result<Option<TransactionId>, Refusal> {
    if let Some(number) = call.args.integer("transaction")? {
        return Ok(Some(TransactionId::from_number(number)));
    }
    let state = call.app.handle.state();
    if let Some(open) = state.transaction {
        if either && vllms {
            return Ok(Some(open));
        }
        let message =
            format!("transaction {open} is open, and this call does not name it as its `transaction`");
        return Err(Refusal::conflict(FINISH, message).about(open));
    }
    if either {
        // Refused by the controller, which knows how it ended.
        call.lost = call.app.updates.lost(&state, vllms);
    }
    Ok(call.lost)
}

fn the_transaction(call: &mut Call) -> Result<TransactionId, Refusal> {
    if let Some(number) = call.args.integer("transaction")? {
        return Ok(TransactionId::from_number(number));
    }
    let state: ControlState = call.app.handle.state();
    if state.transaction.is_none() {
        call.lost = call.app.updates.lost(&state, true);
    }
    state.transaction.or(call.lost).ok_or_else(|| {
        let message = "no weight update is open: it was not started, or it has ended";
        Refusal::conflict(START, message)
    })
}

/// Why no update of weights can be done now, whatever comes with it. Nothing, if calls that wait may change that.
pub fn never(app: &App) -> Option<Refusal> {
    let status = app.handle.status();
    if status.busy.is_some() || status.control_queue > 0 {
        return None;
    }
    let state = status.state;
    let missing = match state.lifecycle {
        Lifecycle::Awake => SLEEP_KV_CACHE,
        Lifecycle::SleepingKept | Lifecycle::SleepingDiscarded => WAKE_WEIGHTS,
        _ => return None,
    };
    let message = format!("update_weights needs {missing} first: the engine is {state}");
    Some(Refusal::conflict(missing, message).state(state))
}
