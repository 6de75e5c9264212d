//! From a client's body to requests of the engine, and how to show what comes of them.

use std::borrow::Cow;

use dormouse::control::SubmitError;
use dormouse::{Request, SamplingParams, TokenId};
use serde_json::{Value, json};

use super::types::{self, Body, Logprobs, Message, Prompt};
use super::{ApiError, Endpoint};
use crate::app::App;
use crate::flow::Reading;

/// Most completions of one request, of all its prompts together.
pub const MAX_CHOICES: usize = 16384;
/// Most entries of the lists of tokens of one request, of all its prompts together.
const MAX_LISTED: usize = 1 << 22;

/// A request that is ready to run.
pub struct Plan {
    /// One for each prompt.
    pub requests: Vec<Request>,
    /// The name of them all, if they are several.
    pub group: Option<String>,
    /// How tokens become text.
    pub reading: Reading,
    /// What the answer has.
    pub show: Show,
}

/// What an answer has, and in which form.
#[derive(Debug, Clone)]
pub struct Show {
    /// Which endpoint answers.
    pub endpoint: Endpoint,
    /// Whether it comes in pieces.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub usage: bool,
    /// Alternatives of each token; `None`: no logprobs.
    pub logprobs: Option<usize>,
    /// Whether choices have their token ids.
    pub token_ids: bool,
    /// Whether choices have the prompt's token ids.
    pub prompt_ids: bool,
    /// Whether logprobs name tokens by id.
    pub ids_as_text: bool,
}

/// Makes a plan of a body.
///
/// # Errors
/// What is wrong with the body.
pub fn plan(app: &App, endpoint: Endpoint, body: &[u8]) -> Result<Plan, ApiError> {
    let mut body: Body = types::parse(body)?;
    check_model(app, &body)?;
    check_support(app, endpoint, &body)?;
    let show = show(endpoint, &body)?;
    let prompts = match endpoint {
        Endpoint::Completions => prompts(app, body.prompt.take())?,
        Endpoint::Chat => vec![conversation(app, &mut body)?],
    };
    let params = params(endpoint, &body, &show)?;
    let limit = body.max_completion_tokens.or(body.max_tokens);
    let count = prompts.len();
    let max_model_len = app.handle.limits().max_model_len;
    let request = |index: usize, prompt: Vec<TokenId>| {
        let mut request = Request::new(prompt).params(params.clone());
        if endpoint == Endpoint::Chat && limit.is_none() {
            // OpenAI's default: as many as there is room for.
            request.params.max_new_tokens = max_model_len.saturating_sub(request.prompt.len()).max(1);
        }
        request.cache_salt.clone_from(&body.cache_salt);
        request.id =
            body.request_id.as_ref().map(|id| if count > 1 { format!("{id}-{index}") } else { id.clone() });
        request
    };
    let requests = for_each(app, prompts, request)?;
    let reading = Reading {
        stops: body.stop.map(|stops| stops.0).unwrap_or_default(),
        keep_stop: body.include_stop_str_in_output.unwrap_or(false),
        skip_special: body.skip_special_tokens.unwrap_or(true),
    };
    let group = body.request_id.filter(|_| count > 1);
    Ok(Plan { requests, group, reading, show })
}

/// Makes a request for each prompt. Nothing is repeated before the first one is known to be valid: what repeats
/// is short then, however long the body was.
///
/// # Errors
/// The first request is not valid, or all of them together are too large.
pub fn for_each(
    app: &App,
    prompts: Vec<Vec<TokenId>>,
    mut request: impl FnMut(usize, Vec<TokenId>) -> Request,
) -> Result<Vec<Request>, ApiError> {
    let count = prompts.len();
    let mut requests = Vec::with_capacity(count);
    for (index, prompt) in prompts.into_iter().enumerate() {
        let request = request(index, prompt);
        if index == 0 {
            check_choices(count, request.params.samples)?;
            request.validate(&app.handle.limits()).map_err(SubmitError::from)?;
            check_lists(count, &request.params)?;
        }
        requests.push(request);
    }
    Ok(requests)
}

/// Limits the lists that each prompt has a copy of.
fn check_lists(prompts: usize, params: &SamplingParams) -> Result<(), ApiError> {
    let allowed = params.allowed_tokens.as_ref().map_or(0, Vec::len);
    let entries = params.stop_token_ids.len() + params.logit_bias.len() + allowed;
    if entries.saturating_mul(prompts) <= MAX_LISTED {
        return Ok(());
    }
    let message = format!("{prompts} prompts with lists of {entries} tokens: more than {MAX_LISTED} entries");
    Err(ApiError::param("prompt", message))
}

fn check_model(app: &App, body: &Body) -> Result<(), ApiError> {
    match body.model.as_deref() {
        Some(model) if model != app.model => {
            let model: String = model.chars().take(200).collect();
            let message = format!("the model `{model}` does not exist; there is `{}`", app.model);
            Err(super::no_model(message))
        }
        _ => Ok(()),
    }
}

/// Refuses what is known but not done, and what belongs to the other endpoint.
fn check_support(app: &App, endpoint: Endpoint, body: &Body) -> Result<(), ApiError> {
    let chat = endpoint == Endpoint::Chat;
    let template = body.add_generation_prompt.is_some() || body.chat_template_kwargs.is_some();
    let text_format = body.response_format.as_ref().is_none_or(|format| format.0.r#type == "text");
    let choice = body.tool_choice.as_ref().and_then(Value::as_str);
    let refused = [
        ("prompt", chat && body.prompt.is_some(), "belongs to /v1/completions"),
        ("messages", !chat && body.messages.is_some(), "belongs to /v1/chat/completions"),
        ("top_logprobs", !chat && body.top_logprobs.is_some(), "belongs to /v1/chat/completions"),
        ("chat_template_kwargs", !chat && template, "belongs to /v1/chat/completions"),
        ("echo", body.echo == Some(true), "is not supported"),
        ("suffix", body.suffix.as_deref().is_some_and(|text| !text.is_empty()), "is not supported"),
        ("best_of", body.best_of.is_some_and(|best| best != body.n.unwrap_or(1)), "is supported as n only"),
        ("response_format", !text_format, "is supported as text only"),
        ("tools", body.tools.as_ref().is_some_and(|tools| !tools.is_empty()), "are not supported"),
        (
            "tool_choice",
            body.tool_choice.is_some() && !matches!(choice, Some("none" | "auto")),
            "is not supported",
        ),
        ("stream_options", body.stream_options.is_some() && body.stream != Some(true), "needs stream"),
        ("stop", app.text.is_none() && body.stop.as_ref().is_some_and(|s| !s.0.is_empty()), NO_TOKENIZER),
    ];
    match refused.iter().find(|(_, refused, _)| *refused) {
        Some((name, _, why)) => Err(ApiError::param(*name, format!("{name} {why}"))),
        None => Ok(()),
    }
}

const NO_TOKENIZER: &str = "needs a tokenizer, and the model has none: send token ids to /v1/completions";

fn show(endpoint: Endpoint, body: &Body) -> Result<Show, ApiError> {
    let logprobs = match (endpoint, body.logprobs) {
        (_, None | Some(Logprobs::Switch(false))) => None,
        (Endpoint::Completions, Some(Logprobs::Count(count))) => {
            Some(types::alternatives("logprobs", count)?)
        }
        // As clients of other servers write it.
        (Endpoint::Completions, Some(Logprobs::Switch(true))) => Some(0),
        (Endpoint::Chat, Some(Logprobs::Switch(true))) => {
            Some(types::alternatives("top_logprobs", body.top_logprobs.unwrap_or(0))?)
        }
        (Endpoint::Chat, Some(Logprobs::Count(_))) => {
            return Err(ApiError::param("logprobs", "logprobs is true or false here; see top_logprobs"));
        }
    };
    if endpoint == Endpoint::Chat && body.top_logprobs.is_some() && logprobs.is_none() {
        return Err(ApiError::param("top_logprobs", "top_logprobs needs logprobs to be true"));
    }
    let stream_options = body.stream_options.as_ref();
    Ok(Show {
        endpoint,
        stream: body.stream.unwrap_or(false),
        usage: stream_options.and_then(|options| options.0.include_usage).unwrap_or(false),
        logprobs,
        token_ids: body.return_token_ids.unwrap_or(true),
        prompt_ids: body.return_token_ids.unwrap_or(false),
        ids_as_text: body.return_tokens_as_token_ids.unwrap_or(false),
    })
}

fn params(endpoint: Endpoint, body: &Body, show: &Show) -> Result<SamplingParams, ApiError> {
    let mut params = SamplingParams::default();
    let max_tokens = match endpoint {
        Endpoint::Completions => body.max_tokens.or(body.max_completion_tokens),
        Endpoint::Chat => body.max_completion_tokens.or(body.max_tokens),
    };
    set(&mut params.samples, body.n);
    set(&mut params.max_new_tokens, max_tokens);
    set(&mut params.min_new_tokens, body.min_tokens);
    set(&mut params.temperature, body.temperature);
    set(&mut params.top_p, body.top_p);
    set(&mut params.top_k, body.top_k.map(types::top_k).transpose()?);
    set(&mut params.min_p, body.min_p);
    params.seed = body.seed.as_ref().map(types::seed).transpose()?;
    set(&mut params.stop_token_ids, body.stop_token_ids.clone());
    set(&mut params.ignore_eos, body.ignore_eos);
    set(&mut params.presence_penalty, body.presence_penalty);
    set(&mut params.frequency_penalty, body.frequency_penalty);
    set(&mut params.repetition_penalty, body.repetition_penalty);
    params.logit_bias = body.logit_bias.iter().flatten().map(|(token, bias)| (*token, *bias)).collect();
    params.allowed_tokens.clone_from(&body.allowed_token_ids);
    params.top_logprobs = show.logprobs.unwrap_or(0);
    Ok(params)
}

/// Limits the completions of one request.
fn check_choices(prompts: usize, samples: usize) -> Result<(), ApiError> {
    if prompts.saturating_mul(samples) <= MAX_CHOICES {
        return Ok(());
    }
    let message = format!("{prompts} prompts with n = {samples} are more than {MAX_CHOICES} choices");
    Err(ApiError::param("n", message))
}

/// Takes a value that was given.
pub fn set<T>(to: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *to = value;
    }
}

fn prompts(app: &App, prompt: Option<Prompt>) -> Result<Vec<Vec<TokenId>>, ApiError> {
    match prompt.ok_or_else(|| ApiError::param("prompt", "prompt is missing"))? {
        Prompt::Tokens { prompts, .. } => Ok(prompts),
        Prompt::Texts { texts, .. } => texts.iter().map(|text| encode(app, "prompt", text, true)).collect(),
    }
}

/// Tokens of a client's text.
///
/// # Errors
/// 400 if there is no tokenizer, or the text has no tokens, or more than the model takes.
pub fn encode(app: &App, name: &str, text: &str, special: bool) -> Result<Vec<TokenId>, ApiError> {
    let Some(tokenizer) = &app.text else {
        return Err(ApiError::param(name, format!("{name} as text {NO_TOKENIZER}")));
    };
    let max_model_len = app.handle.limits().max_model_len;
    let limit = tokenizer.longest_bytes(max_model_len);
    if text.len() > limit {
        // Before it is encoded, which takes many times its memory.
        let bytes = text.len();
        let message = format!(
            "{name}: {bytes} bytes of text are more than max_model_len {max_model_len} tokens spell, {limit}"
        );
        return Err(ApiError::param(name, message));
    }
    tokenizer.encode(text, special).map_err(|error| ApiError::param(name, format!("{name}: {error}")))
}

fn conversation(app: &App, body: &mut Body) -> Result<Vec<TokenId>, ApiError> {
    let messages = body.messages.take().unwrap_or_default();
    if messages.is_empty() {
        return Err(ApiError::param("messages", "messages are missing"));
    }
    let messages: Vec<Value> = messages.into_iter().map(|one| message(one.0)).collect();
    let more = body.chat_template_kwargs.take().map_or(Value::Null, Value::Object);
    let text = app
        .chat
        .render(&messages, &more, body.add_generation_prompt.unwrap_or(true))
        .map_err(|error| ApiError::param("messages", format!("the chat template refuses: {error}")))?;
    encode(app, "messages", &text, !app.chat.is_own())
}

/// A message as templates know it.
fn message(message: Message) -> Value {
    let Message { role, content, name, reasoning_content, tool_calls, tool_call_id, .. } = message;
    let content: Cow<'_, str> = content.map_or("".into(), |content| content.0.into());
    let mut value = json!({"role": role, "content": content});
    let mut set = |name: &str, member: Option<Value>| {
        if let Some(member) = member {
            value[name] = member;
        }
    };
    set("name", name.map(Value::from));
    set("reasoning_content", reasoning_content.map(Value::from));
    set("tool_calls", tool_calls.map(Value::from));
    set("tool_call_id", tool_call_id.map(Value::from));
    value
}
