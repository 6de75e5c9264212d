//! Choices as JSON, written straight into the answer: what a stream does for each token is little.

use std::io::Write as _;

use dormouse::{TokenId, TokenLogprob, VersionSpan, WeightVersion};
use serde::Serialize;

use super::Endpoint;
use super::plan::Show;
use crate::app::App;
use crate::flow::{End, Piece, Why};

/// Writes the choices of one answer.
pub struct Writer {
    app: App,
    show: Show,
    /// The beginning of the answer and of each chunk, up to the list of choices.
    head: Vec<u8>,
}

/// One choice to write.
pub struct Part<'a> {
    /// Its index in the answer.
    pub index: usize,
    /// What is new of it.
    pub piece: &'a Piece,
    /// How it ended, if it has.
    pub end: Option<&'a End>,
    /// Characters of text before the piece, by its tokens.
    pub text_offset: usize,
    /// The prompt, where it is shown.
    pub prompt: Option<&'a [TokenId]>,
}

impl Writer {
    /// Prepares an answer with this id.
    pub fn new(app: &App, show: &Show, id: &str) -> Self {
        let object = match (show.endpoint, show.stream) {
            (Endpoint::Completions, _) => "text_completion",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Chat, true) => "chat.completion.chunk",
        };
        let mut head = Vec::new();
        head.extend_from_slice(b"{\"id\":");
        put(&mut head, id);
        let created = crate::app::unix_seconds();
        let _ = write!(head, ",\"object\":\"{object}\",\"created\":{created},\"model\":");
        put(&mut head, &app.model);
        head.extend_from_slice(b",\"choices\":[");
        Self { app: app.clone(), show: show.clone(), head }
    }

    /// Begins an answer or a chunk.
    pub fn begin(&self, out: &mut Vec<u8>) {
        if self.show.stream {
            out.extend_from_slice(b"data: ");
        }
        out.extend_from_slice(&self.head);
    }

    /// Ends an answer or a chunk; `more` are members with their commas.
    pub fn end(&self, out: &mut Vec<u8>, more: &[u8]) {
        out.push(b']');
        out.extend_from_slice(more);
        out.push(b'}');
        if self.show.stream {
            out.extend_from_slice(b"\n\n");
        }
    }

    /// Writes the chunk that opens a choice of a chat.
    pub fn role(&self, out: &mut Vec<u8>, index: usize) {
        self.begin(out);
        let delta =
            "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null";
        let _ = write!(out, "{{\"index\":{index},{delta}}}");
        self.end(out, b"");
    }

    /// Writes a choice; returns its characters, by its tokens.
    pub fn choice(&self, out: &mut Vec<u8>, part: &Part<'_>) -> usize {
        let _ = write!(out, "{{\"index\":{},", part.index);
        match (self.show.endpoint, self.show.stream) {
            (Endpoint::Completions, _) => out.extend_from_slice(b"\"text\":"),
            (Endpoint::Chat, true) => out.extend_from_slice(b"\"delta\":{\"content\":"),
            (Endpoint::Chat, false) => {
                out.extend_from_slice(b"\"message\":{\"role\":\"assistant\",\"refusal\":null,\"content\":");
            }
        }
        put(out, part.piece.text.as_str());
        if self.show.endpoint == Endpoint::Chat {
            out.push(b'}');
        }
        out.extend_from_slice(b",\"logprobs\":");
        let characters = match (self.show.logprobs, self.show.endpoint) {
            (None, _) => {
                out.extend_from_slice(b"null");
                0
            }
            (Some(count), Endpoint::Completions) => self.logprobs(out, part, count),
            (Some(count), Endpoint::Chat) => {
                self.chat_logprobs(out, part.piece, count);
                0
            }
        };
        if self.show.token_ids {
            out.extend_from_slice(b",\"token_ids\":");
            put(out, &part.piece.tokens);
        }
        if let Some(prompt) = part.prompt {
            out.extend_from_slice(b",\"prompt_token_ids\":");
            put(out, prompt);
        }
        out.extend_from_slice(b",\"finish_reason\":");
        match part.end {
            Some(end) => write_end(out, end),
            None => out.extend_from_slice(b"null"),
        }
        out.push(b'}');
        characters
    }

    fn logprobs(&self, out: &mut Vec<u8>, part: &Part<'_>, count: usize) -> usize {
        let piece = part.piece;
        let names: Vec<String> = piece.tokens.iter().map(|&token| self.name(token)).collect();
        let mut offsets = Vec::with_capacity(names.len());
        let mut at = part.text_offset;
        for name in &names {
            offsets.push(at);
            at += name.chars().count();
        }
        out.extend_from_slice(b"{\"tokens\":");
        put(out, &names);
        out.extend_from_slice(b",\"token_logprobs\":");
        put(out, &piece.logprobs);
        out.extend_from_slice(b",\"text_offset\":");
        put(out, &offsets);
        out.extend_from_slice(b",\"top_logprobs\":");
        if count == 0 {
            out.extend_from_slice(b"null}");
            return at - part.text_offset;
        }
        list(out, piece.top.iter().enumerate(), |out, (index, top)| {
            // The chosen token is there even if it is none of the likeliest.
            let chosen = (names[index].clone(), piece.logprobs[index]);
            let named = top.iter().map(|one| (self.name(one.token), one.logprob));
            let map: serde_json::Map<String, serde_json::Value> =
                named.chain([chosen]).map(|(name, logprob)| (name, logprob.into())).collect();
            put(out, &map);
        });
        out.push(b'}');
        at - part.text_offset
    }

    fn chat_logprobs(&self, out: &mut Vec<u8>, piece: &Piece, count: usize) {
        out.extend_from_slice(b"{\"refusal\":null,\"content\":");
        list(out, piece.tokens.iter().enumerate(), |out, (index, &token)| {
            out.push(b'{');
            self.chat_token(out, &TokenLogprob { token, logprob: piece.logprobs[index] });
            out.extend_from_slice(b",\"top_logprobs\":");
            let top = if count > 0 { piece.top[index].as_slice() } else { &[] };
            list(out, top.iter(), |out, one| {
                out.push(b'{');
                self.chat_token(out, one);
                out.push(b'}');
            });
            out.push(b'}');
        });
        out.push(b'}');
    }

    fn chat_token(&self, out: &mut Vec<u8>, one: &TokenLogprob) {
        let name = self.name(one.token);
        out.extend_from_slice(b"\"token\":");
        put(out, name.as_str());
        out.extend_from_slice(b",\"logprob\":");
        put(out, &one.logprob);
        out.extend_from_slice(b",\"bytes\":");
        // A part of a character has no text of its own to take bytes from.
        let whole = !self.show.ids_as_text && self.app.text.is_some() && !name.contains('\u{fffd}');
        put(out, &whole.then_some(name.as_bytes()));
    }

    /// A token by its text, or by its id if that is asked for or all there is.
    fn name(&self, token: TokenId) -> String {
        match &self.app.text {
            Some(text) if !self.show.ids_as_text => text.decode(&[token], false),
            _ => format!("token_id:{token}"),
        }
    }
}

fn write_end(out: &mut Vec<u8>, end: &End) {
    put(out, end.why.as_str());
    match &end.why {
        Why::StopString(stop) => {
            out.extend_from_slice(b",\"stop_reason\":");
            put(out, stop.as_str());
        }
        Why::StopToken(token) => drop(write!(out, ",\"stop_reason\":{token}")),
        Why::Error(error) => {
            out.extend_from_slice(b",\"error\":");
            put(out, &error.to_string());
        }
        _ => {}
    }
    let _ = write!(out, ",\"seed\":{}", end.seed);
    if end.versions.len() > 1 {
        out.extend_from_slice(b",\"weight_versions\":");
        put(out, &end.versions);
    }
}

/// The member that says which weights made the last tokens of an answer.
pub fn weight_version<'a>(
    ends: impl Iterator<Item = &'a End>,
    now: impl FnOnce() -> Option<WeightVersion>,
    out: &mut Vec<u8>,
) {
    let last = ends.filter_map(|end| end.versions.last()).map(|VersionSpan { version, .. }| version);
    out.extend_from_slice(b",\"weight_version\":");
    match last.max_by_key(|version| version.counter) {
        Some(version) => put(out, version),
        // There is no token.
        None => put(out, &now()),
    }
}

/// Writes a value as JSON.
pub fn put<T: Serialize + ?Sized>(out: &mut Vec<u8>, value: &T) {
    // Strings, numbers, and lists of them: there is nothing that could fail.
    let _ = serde_json::to_writer(out, value);
}

/// Writes a list.
pub fn list<T>(out: &mut Vec<u8>, items: impl Iterator<Item = T>, mut write: impl FnMut(&mut Vec<u8>, T)) {
    out.push(b'[');
    for (index, item) in items.enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write(out, item);
    }
    out.push(b']');
}
