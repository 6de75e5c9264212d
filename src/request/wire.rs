//! JSON forms of single fields.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::TokenId;

/// Reads `top_k`, where -1 is an old spelling of "off".
pub(super) fn top_k<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let value = i64::deserialize(deserializer)?;
    if value == -1 {
        return Ok(0);
    }
    usize::try_from(value)
        .map_err(|_| de::Error::invalid_value(de::Unexpected::Signed(value), &"-1, 0 or a number of tokens"))
}

/// A token id as a number, or as the string that JSON makes of a map's key.
struct TokenKey(TokenId);

impl<'de> Deserialize<'de> for TokenKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokenKeyVisitor;
        impl Visitor<'_> for TokenKeyVisitor {
            type Value = TokenKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<TokenKey, E> {
                TokenId::try_from(value)
                    .map(TokenKey)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(value), &self))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<TokenKey, E> {
                value.parse().map(TokenKey).map_err(|_| E::invalid_value(de::Unexpected::Str(value), &self))
            }
        }
        deserializer.deserialize_any(TokenKeyVisitor)
    }
}

/// `logit_bias`: a map or a list of pairs, `null` for negative infinity, which JSON cannot write.
pub(super) mod logit_bias {
    use serde::ser::{Error, Serializer};

    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        bias: &[(TokenId, f32)],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        if let Some((token, value)) = bias.iter().find(|(_, v)| v.is_nan() || *v == f32::INFINITY) {
            return Err(S::Error::custom(format_args!(
                "logit bias {value} of token {token} has no JSON form"
            )));
        }
        serializer.collect_seq(bias.iter().map(|&(token, value)| (token, value.is_finite().then_some(value))))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(TokenId, f32)>, D::Error> {
        deserializer.deserialize_any(BiasVisitor)
    }

    struct BiasVisitor;

    impl<'de> Visitor<'de> for BiasVisitor {
        type Value = Vec<(TokenId, f32)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map from token id to bias, or a list of [token id, bias]")
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(Vec::new())
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut bias = Vec::new();
            while let Some((TokenKey(token), value)) = map.next_entry::<TokenKey, Option<f32>>()? {
                bias.push((token, value.unwrap_or(f32::NEG_INFINITY)));
            }
            Ok(bias)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut bias = Vec::new();
            while let Some((TokenKey(token), value)) = seq.next_element::<(TokenKey, Option<f32>)>()? {
                bias.push((token, value.unwrap_or(f32::NEG_INFINITY)));
            }
            Ok(bias)
        }
    }
}
