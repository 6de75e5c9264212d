//! SGLang's `POST /generate`: text or token ids in, text with `output_ids` and `meta_info` out. A stream gives all
//! the text and tokens so far each time, as SGLang's does.

mod answer;

use std::collections::BTreeMap;
use std::time::Instant;

use axum::Router;
use axum::extract::{Request as HttpRequest, State};
use axum::response::Response;
use axum::routing::post;
use dormouse::{Request, SamplingParams, TokenId};
use serde::Deserialize;

use crate::app::App;
use crate::flow::{Flow, Reading};
use crate::http;
use crate::openai::{self, ApiError, Object, Prompt, Stops, set};

/// The body; names that are not here are errors.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Body {
    text: Option<Prompt>,
    input_ids: Option<Prompt>,
    sampling_params: Option<Object<Sampling>>,
    rid: Option<Rids>,
    stream: Option<bool>,
    return_logprob: Option<bool>,
    logprob_start_len: Option<i64>,
    top_logprobs_num: Option<usize>,
    return_text_in_logprobs: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Sampling {
    n: Option<usize>,
    max_new_tokens: Option<usize>,
    min_new_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    sampling_seed: Option<serde_json::Number>,
    stop: Option<Stops>,
    stop_token_ids: Option<Vec<TokenId>>,
    ignore_eos: Option<bool>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repetition_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<TokenId, f32>>,
    skip_special_tokens: Option<bool>,
    no_stop_trim: Option<bool>,
    /// How the tokenizer spells is the tokenizer's business.
    #[serde(rename = "spaces_between_special_tokens")]
    _spaces: Option<bool>,
}

/// One name, or one for each prompt.
#[derive(Deserialize)]
#[serde(untagged)]
enum Rids {
    One(String),
    Each(Vec<String>),
}

/// What an answer has.
struct Show {
    rids: Vec<String>,
    prompts: Vec<Vec<TokenId>>,
    logprobs: bool,
    top: bool,
    /// The first prompt token whose logprob is shown.
    from: usize,
    texts: bool,
    /// Whether the answer is a list.
    many: bool,
    received: Instant,
}

/// The route.
pub fn routes() -> Router<App> {
    Router::new().route("/generate", post(generate).put(generate))
}

async fn generate(State(app): State<App>, request: HttpRequest) -> Result<Response, ApiError> {
    let received = Instant::now();
    let body = http::read_json(&app, request, http::GENERATION_BYTES).await?;
    let for_plan = app.clone();
    let planned = http::think(&app, body, move |body| plan(&for_plan, body, received)).await?;
    let (requests, group, reading, mut show, stream) = planned;
    let flow = Flow::start(&app, requests, group, reading, stream)?;
    if show.rids.is_empty() {
        let first = flow.id().get();
        show.rids = (0..)
            .take(show.prompts.len())
            .map(|index| format!("{:x}-{}", app.started, first + index))
            .collect();
    }
    if stream {
        return Ok(answer::stream(app, flow, show));
    }
    answer::whole(&app, flow.finish().await?, &show)
}

type Planned = (Vec<Request>, Option<String>, Reading, Show, bool);

fn plan(app: &App, body: &[u8], received: Instant) -> Result<Planned, ApiError> {
    let body: Body = openai::parse(body)?;
    let mut sampling = body.sampling_params.map(|params| params.0).unwrap_or_default();
    let (prompts, listed) = match (body.text, body.input_ids) {
        (Some(text), None) => prompts(app, "text", text)?,
        (None, Some(ids)) => prompts(app, "input_ids", ids)?,
        _ => return Err(ApiError::param("text", "there must be either text or input_ids")),
    };
    let logprobs = body.return_logprob.unwrap_or(false);
    let top = body.top_logprobs_num.filter(|_| logprobs).unwrap_or(0);
    let mut params = params(&sampling)?;
    params.top_logprobs = top;
    let from = first_logprob(body.logprob_start_len, &prompts)?;
    params.prompt_logprobs = logprobs && from.is_some();
    let stops = sampling.stop.take().map(|stops| stops.0).unwrap_or_default();
    if app.text.is_none() && !stops.is_empty() {
        return Err(ApiError::param("stop", "stop needs a tokenizer, and the model has none"));
    }
    let group = match &body.rid {
        Some(Rids::One(rid)) if prompts.len() > 1 => Some(rid.clone()),
        _ => None,
    };
    let rids = rids(body.rid, prompts.len())?;
    let requests = openai::for_each(app, prompts.clone(), |index, prompt| {
        let mut request = Request::new(prompt).params(params.clone());
        request.id = rids.get(index).cloned();
        request
    })?;
    let reading = Reading {
        stops,
        keep_stop: sampling.no_stop_trim.unwrap_or(false),
        skip_special: sampling.skip_special_tokens.unwrap_or(true),
    };
    let show = Show {
        many: listed || params.samples > 1,
        rids,
        prompts,
        logprobs,
        top: top > 0,
        from: from.unwrap_or(0),
        texts: body.return_text_in_logprobs.unwrap_or(false),
        received,
    };
    Ok((requests, group, reading, show, body.stream.unwrap_or(false)))
}

/// Tokens of the prompts, and whether they came as a list.
fn prompts(app: &App, name: &str, prompt: Prompt) -> Result<(Vec<Vec<TokenId>>, bool), ApiError> {
    match (name, prompt) {
        ("text", Prompt::Texts { texts, listed }) => {
            let tokens: Result<_, _> =
                texts.iter().map(|text| openai::encode(app, name, text, true)).collect();
            Ok((tokens?, listed))
        }
        ("input_ids", Prompt::Tokens { prompts, listed }) => Ok((prompts, listed)),
        _ => Err(ApiError::param(name, format!("{name} has the wrong kind of prompt"))),
    }
}

/// The first prompt token whose logprob is asked for: -1 asks for none.
fn first_logprob(start: Option<i64>, prompts: &[Vec<TokenId>]) -> Result<Option<usize>, ApiError> {
    let Some(start) = start.filter(|start| *start != -1) else { return Ok(None) };
    let shortest = prompts.iter().map(Vec::len).min().unwrap_or(0);
    match usize::try_from(start) {
        Ok(start) if start < shortest => Ok(Some(start)),
        _ => {
            let message =
                format!("logprob_start_len is {start}, neither -1 nor a place in {shortest} prompt tokens");
            Err(ApiError::param("logprob_start_len", message))
        }
    }
}

fn rids(rids: Option<Rids>, prompts: usize) -> Result<Vec<String>, ApiError> {
    match rids {
        None => Ok(Vec::new()),
        Some(Rids::One(rid)) if prompts == 1 => Ok(vec![rid]),
        // Checked before there is one for each prompt.
        Some(Rids::One(rid)) if rid.len() > Request::MAX_ID_BYTES => {
            let (bytes, limit) = (rid.len(), Request::MAX_ID_BYTES);
            Err(ApiError::param("rid", format!("rid has {bytes} bytes, more than {limit}")))
        }
        Some(Rids::One(rid)) => Ok((0..prompts).map(|index| format!("{rid}_{index}")).collect()),
        Some(Rids::Each(rids)) if rids.len() == prompts => Ok(rids),
        Some(Rids::Each(rids)) => {
            Err(ApiError::param("rid", format!("{} names for {prompts} prompts", rids.len())))
        }
    }
}

fn params(sampling: &Sampling) -> Result<SamplingParams, ApiError> {
    let mut params = SamplingParams::default();
    // SGLang's default.
    params.max_new_tokens = 128;
    set(&mut params.samples, sampling.n);
    set(&mut params.max_new_tokens, sampling.max_new_tokens);
    set(&mut params.min_new_tokens, sampling.min_new_tokens);
    set(&mut params.temperature, sampling.temperature);
    set(&mut params.top_p, sampling.top_p);
    set(&mut params.top_k, sampling.top_k.map(openai::top_k).transpose()?);
    set(&mut params.min_p, sampling.min_p);
    params.seed = sampling.sampling_seed.as_ref().map(openai::seed).transpose()?;
    set(&mut params.stop_token_ids, sampling.stop_token_ids.clone());
    set(&mut params.ignore_eos, sampling.ignore_eos);
    set(&mut params.presence_penalty, sampling.presence_penalty);
    set(&mut params.frequency_penalty, sampling.frequency_penalty);
    set(&mut params.repetition_penalty, sampling.repetition_penalty);
    params.logit_bias = sampling.logit_bias.iter().flatten().map(|(token, bias)| (*token, *bias)).collect();
    Ok(params)
}
