//! Forms of outputs, and version spans.

use super::*;
use crate::weights::{WeightVersion, WeightsDigest};

fn version(counter: u64) -> WeightVersion {
    WeightVersion { counter, digest: WeightsDigest::from_bytes([counter as u8; 32]), label: None }
}

#[test]
fn spans_follow_the_versions_of_tokens() {
    let mut spans = Vec::new();
    for counter in [4, 4, 4, 5, 4] {
        VersionSpan::push(&mut spans, &version(counter));
    }
    let expected = [(4, 0..3), (5, 3..4), (4, 4..5)];
    assert_eq!(spans, expected.map(|(counter, tokens)| VersionSpan { version: version(counter), tokens }));
    assert_eq!(VersionSpan::check_cover(&spans, 5), Ok(()));
    assert_eq!(VersionSpan::check_cover(&spans, 4), Err(4));
    assert_eq!(VersionSpan::check_cover(&spans, 6), Err(5));
    assert_eq!(VersionSpan::check_cover(&spans[1..], 5), Err(0));
    assert_eq!(VersionSpan::check_cover(&[], 0), Ok(()));
}

#[test]
fn json_forms_stay_as_they_are() {
    let span = VersionSpan { version: version(0xab), tokens: 2..5 };
    let json = format!(r#"{{"counter":171,"digest":"{}","start":2,"end":5}}"#, "ab".repeat(32));
    assert_eq!(serde_json::to_string(&span).unwrap(), json);
    assert_eq!(serde_json::from_str::<VersionSpan>(&json).unwrap(), span);
    for digest in ["", "ab", &"zz".repeat(32), &"é".repeat(32), &"+1".repeat(32)] {
        let json = format!(r#"{{"counter":1,"digest":"{digest}","start":0,"end":0}}"#);
        assert!(serde_json::from_str::<VersionSpan>(&json).is_err(), "{digest}");
    }
    for (reason, name, json) in [
        (FinishReason::Stop { by: StopCause::Eos(2) }, "stop", r#"{"reason":"stop","by":{"eos":2}}"#),
        (
            FinishReason::Stop { by: StopCause::Sequence(1) },
            "stop",
            r#"{"reason":"stop","by":{"sequence":1}}"#,
        ),
        (FinishReason::Length, "length", r#"{"reason":"length"}"#),
        (FinishReason::Abort, "abort", r#"{"reason":"abort"}"#),
        (
            FinishReason::Error(CompletionError::NonFiniteLogits { position: 3 }),
            "error",
            r#"{"reason":"error","error":"non_finite_logits","position":3}"#,
        ),
    ] {
        assert_eq!((reason.as_str(), reason.to_string().as_str()), (name, name));
        assert_eq!(serde_json::to_string(&reason).unwrap(), json);
        assert_eq!(serde_json::from_str::<FinishReason>(json).unwrap(), reason);
    }
}

#[test]
fn logprobs_survive_json_to_the_last_bit() {
    for bits in (0..2000_u32).map(|i| 0x8000_0000 | i.wrapping_mul(2_147_483) & 0x7fff_ffff) {
        let logprob = f32::from_bits(bits);
        if logprob.is_finite() {
            let json = serde_json::to_string(&TokenLogprob { token: 1, logprob }).unwrap();
            let back: TokenLogprob = serde_json::from_str(&json).unwrap();
            assert_eq!(back.logprob.to_bits(), bits, "{json}");
        }
    }
}
