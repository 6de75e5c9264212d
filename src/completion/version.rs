//! Which weights made which tokens.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::weights::{WeightVersion, WeightsDigest};

/// Consecutive tokens of a completion that one version of the weights made.
///
/// In JSON: `{"counter": 1, "digest": "<64 hex digits>", "start": 0, "end": 10}`, with a `label` if there is one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "SpanWire", into = "SpanWire")]
pub struct VersionSpan {
    /// The weights. In a resumed request this is the caller's word: it is passed on, never trusted.
    pub version: WeightVersion,
    /// The tokens, as indices into the completion.
    pub tokens: Range<usize>,
}

impl VersionSpan {
    /// Records that `version` made the next token.
    pub(crate) fn push(spans: &mut Vec<VersionSpan>, version: &WeightVersion) {
        let end = spans.last().map_or(0, |last| last.tokens.end);
        match spans.last_mut() {
            Some(last) if last.version == *version => last.tokens.end += 1,
            _ => spans.push(VersionSpan { version: version.clone(), tokens: end..end + 1 }),
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
    digest: WeightsDigest,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    label: Option<String>,
    start: usize,
    end: usize,
}

impl From<VersionSpan> for SpanWire {
    fn from(span: VersionSpan) -> Self {
        let VersionSpan { version: WeightVersion { counter, digest, label }, tokens } = span;
        let label = label.as_deref().map(str::to_owned);
        SpanWire { counter, digest, label, start: tokens.start, end: tokens.end }
    }
}

impl From<SpanWire> for VersionSpan {
    fn from(wire: SpanWire) -> Self {
        let SpanWire { counter, digest, label, start, end } = wire;
        VersionSpan {
            version: WeightVersion { counter, digest, label: label.map(Arc::from) },
            tokens: start..end,
        }
    }
}
