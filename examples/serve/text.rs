//! Text in, text out: the tokenizer, text as it grows token by token, and stop strings.

use std::path::Path;

use dormouse::TokenId;
use tokenizers::Tokenizer;

/// Stands for bytes that are no character (yet).
const REPLACEMENT: char = '\u{fffd}';
/// Tokens that are decoded together at most; more are cut down to [`CONTEXT`].
const WINDOW: usize = 8;
/// Tokens before the new ones that decide how these are spelled.
const CONTEXT: usize = 4;

/// A model's tokenizer.
pub struct Text {
    tokenizer: Tokenizer,
    /// Bytes of the longest token.
    longest: usize,
}

impl Text {
    /// Reads `tokenizer.json`, if the directory has one.
    ///
    /// # Errors
    /// The file is there but is no tokenizer.
    pub fn open(directory: &Path) -> Result<Option<Self>, String> {
        let path = directory.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        let tokenizer =
            Tokenizer::from_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let longest = tokenizer.get_vocab(true).keys().map(String::len).max().unwrap_or(0).max(1);
        Ok(Some(Self { tokenizer, longest }))
    }

    /// Bytes of the longest text that so many tokens may spell.
    pub fn longest_bytes(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.longest)
    }

    /// Tokens of a text, with those that the tokenizer puts around any text if `special`.
    ///
    /// # Errors
    /// The text has a part that no token spells.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenId>, String> {
        let encoding = self.tokenizer.encode_fast(text, special).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of some tokens. Ids that the tokenizer doesn't know have none.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        self.tokenizer.decode(tokens, skip_special).unwrap_or_default()
    }
}

/// Text of a completion as its tokens come. What is put out never changes: bytes that may be the beginning of a
/// character wait for the rest of it.
pub struct Detokenizer {
    skip_special: bool,
    /// The last tokens: some whose text is out, then those whose text may not be.
    window: Vec<TokenId>,
    /// How much of the window's text is out.
    out: usize,
}

impl Detokenizer {
    /// Starts a text; special tokens have none if `skip_special`.
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, window: Vec::new(), out: 0 }
    }

    /// Takes a token, and adds the text that is certain now to `to`.
    pub fn push(&mut self, text: &Text, token: TokenId, to: &mut String) {
        self.window.push(token);
        let decoded = text.decode(&self.window, self.skip_special);
        let mut certain = decoded.trim_end_matches(REPLACEMENT).len();
        if self.window.len() > WINDOW && certain < decoded.len() {
            // More bytes than a character has: all but the last are no character, and won't be.
            certain = decoded.len() - REPLACEMENT.len_utf8();
        }
        to.push_str(decoded.get(self.out..certain).unwrap_or_default());
        self.out = self.out.max(certain);
        if self.window.len() > WINDOW {
            let waits = decoded.len().saturating_sub(self.out);
            self.window.drain(..self.window.len() - CONTEXT);
            self.out = text.decode(&self.window, self.skip_special).len().saturating_sub(waits);
        }
    }

    /// Adds what still waited: the text is over, so it is no character.
    pub fn finish(&mut self, text: &Text, to: &mut String) {
        let decoded = text.decode(&self.window, self.skip_special);
        to.push_str(decoded.get(self.out..).unwrap_or_default());
        self.out = decoded.len();
    }
}

/// Finds stop strings in a text that comes in pieces, and holds back what may be the beginning of one.
pub struct StopStrings<'a> {
    stops: &'a [String],
    keep_stop: bool,
}

impl<'a> StopStrings<'a> {
    /// Looks for these; one that is found stays in the text if `keep_stop`.
    pub fn new(stops: &'a [String], keep_stop: bool) -> Self {
        Self { stops, keep_stop }
    }

    /// Moves from `held` to `to` what no stop string can reach any more. If there is one in `held`, moves the text
    /// before it, drops the rest, and says which.
    pub fn scan(&self, held: &mut String, to: &mut String) -> Option<usize> {
        let find = |(index, stop): (usize, &String)| held.find(stop.as_str()).map(|at| (at, index));
        if let Some((at, index)) = self.stops.iter().enumerate().filter_map(find).min() {
            let end = if self.keep_stop { at + self.stops[index].len() } else { at };
            to.push_str(&held[..end]);
            held.clear();
            return Some(index);
        }
        let certain = self.stops.iter().map(|stop| held.len() - overlap(held, stop)).min();
        let certain = certain.unwrap_or(held.len());
        to.push_str(&held[..certain]);
        held.drain(..certain);
        None
    }
}

/// Bytes of the longest beginning of `stop` that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest).rev().find(|&len| stop.is_char_boundary(len) && text.ends_with(&stop[..len])).unwrap_or(0)
}
