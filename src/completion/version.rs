//! Which weights made which tokens.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::weights::{WeightVersion, WeightsDigest};

/// Consecutive tokens of a completion that one version of the weights made.
///
/// In JSON: `{"counter": 1, "digest": "<64 hex digits>", "start": 0, "end": 10}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SpanWire", into = "SpanWire")]
pub struct VersionSpan {
    /// The weights. In a resumed request this is the caller's word: it is passed on, never trusted.
    pub version: WeightVersion,
    /// The tokens, as indices into the completion.
    pub tokens: Range<usize>,
}

impl VersionSpan {
    /// Records that `version` made the next token.
    pub(crate) fn push(spans: &mut Vec<VersionSpan>, version: WeightVersion) {
        let end = spans.last().map_or(0, |last| last.tokens.end);
        match spans.last_mut() {
            Some(last) if last.version == version => last.tokens.end += 1,
            _ => spans.push(VersionSpan { version, tokens: end..end + 1 }),
        }
    }

    /// Checks that the spans cover `tokens` tokens once, in order, none being empty.
    ///
    /// # Errors
    /// How many tokens are covered before the first fault.
    pub(crate) fn check_cover(spans: &[VersionSpan], tokens: usize) -> Result<(), usize> {
        let mut covered = 0;
        for Range { start, end } in spans.iter().map(|span| span.tokens.clone()) {
            if start != covered || end <= start || end > tokens {
                return Err(covered);
            }
            covered = end;
        }
        if covered == tokens { Ok(()) } else { Err(covered) }
    }
}

/// The JSON form of [`VersionSpan`].
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpanWire {
    counter: u64,
    digest: String,
    start: usize,
    end: usize,
}

impl From<VersionSpan> for SpanWire {
    fn from(span: VersionSpan) -> Self {
        let VersionSpan { version, tokens } = span;
        let digest = version.digest.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        SpanWire { counter: version.counter, digest, start: tokens.start, end: tokens.end }
    }
}

/// A version span whose digest cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("digest of {bytes} bytes, not 64 hex digits")]
struct DigestFormError {
    bytes: usize,
}

impl TryFrom<SpanWire> for VersionSpan {
    type Error = DigestFormError;

    fn try_from(wire: SpanWire) -> Result<Self, DigestFormError> {
        let digest = parse_hex(&wire.digest).ok_or(DigestFormError { bytes: wire.digest.len() })?;
        let version = WeightVersion { counter: wire.counter, digest: WeightsDigest::from_bytes(digest) };
        Ok(VersionSpan { version, tokens: wire.start..wire.end })
    }
}

fn parse_hex(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 {
        return None;
    }
    let nibble = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8);
    let mut digest = [0; 32];
    for (byte, digits) in digest.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = nibble(digits[0])? << 4 | nibble(digits[1])?;
    }
    Some(digest)
}
