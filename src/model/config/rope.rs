//! Rotary position embedding: base, scaling, and the frequencies they give.

use std::f64::consts::PI;

use super::fields::{Fields, show};
use super::{ConfigError, MAX_POSITIONS};

/// `rope_theta` where a configuration has none.
const DEFAULT_THETA: f64 = 10_000.0;

/// How the frequencies of the rotary embedding are stretched for contexts longer than the trained one.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by `factor`.
    Linear {
        /// Above 0.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, those between interpolated.
    Llama3 {
        /// Above 0.
        factor: f64,
        /// Wavelengths above `original_max_positions / low_freq_factor` tokens are low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_positions / high_freq_factor` tokens are high frequencies.
        high_freq_factor: f64,
        /// Context length of the pretraining, in tokens.
        original_max_positions: usize,
    },
    /// YaRN. Source: Peng et al. 2023, "YaRN", §3.
    Yarn {
        /// Above 0.
        factor: f64,
        /// Multiplies cosine and sine; given, or derived from the factor and the `mscale` fields.
        attention_factor: f64,
        /// Dimensions that turn more often than this over the original context are kept.
        beta_fast: f64,
        /// Dimensions that turn less often than this are divided by `factor`.
        beta_slow: f64,
        /// Whether the bounds of the ramp are rounded outwards to whole dimensions.
        truncate: bool,
        /// Context length of the pretraining, in tokens.
        original_max_positions: usize,
    },
}

/// Base and scaling of the rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rope {
    /// Base of the geometric series of wavelengths.
    pub(crate) theta: f64,
    /// How it is stretched.
    pub(crate) scaling: RopeScaling,
}

impl Rope {
    /// Reads `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5).
    ///
    /// Where both styles occur they must agree: transformers 4 and 5 would read different ones.
    pub(super) fn parse(config: Fields<'_>, max_positions: usize) -> Result<Self, ConfigError> {
        reject_partial(config)?;
        let classic = config.object("rope_scaling", "rope_scaling.")?;
        let modern = config.object("rope_parameters", "rope_parameters.")?;
        if let (Some(_), Some(_), Some(old), Some(new)) =
            (classic, modern, config.value("rope_scaling"), config.value("rope_parameters"))
            && old != new
        {
            return Err(ConfigError::contradiction(
                ("rope_scaling", show(old)),
                ("rope_parameters", show(new)),
            ));
        }
        let top_theta = config.positive("rope_theta")?;
        let Some(fields) = modern.or(classic) else {
            return Ok(Self { theta: top_theta.unwrap_or(DEFAULT_THETA), scaling: RopeScaling::None });
        };
        reject_partial(fields)?;
        if let Some((key, _)) = fields.entries().find(|(_, value)| value.is_object()) {
            // Different parameters for each kind of layer.
            return Err(fields.unsupported(key));
        }
        let theta = agreed(
            (fields.path("rope_theta"), fields.positive("rope_theta")?),
            ("rope_theta".into(), top_theta),
        )?
        .unwrap_or(DEFAULT_THETA);
        let original = agreed(
            (
                fields.path("original_max_position_embeddings"),
                fields.size("original_max_position_embeddings", MAX_POSITIONS)?,
            ),
            (
                "original_max_position_embeddings".into(),
                config.size("original_max_position_embeddings", MAX_POSITIONS)?,
            ),
        )?
        .unwrap_or(max_positions);
        Ok(Self { theta, scaling: parse_scaling(fields, theta, original, max_positions)? })
    }

    /// Angle in radians that each pair of a head's dimensions turns from one position to the next, and the
    /// factor that multiplies every cosine and sine.
    ///
    /// Single precision, operation by operation in transformers' order; powers are rounded once from double
    /// precision, so they don't depend on the platform's `powf`.
    ///
    /// Source: transformers 4.57 and 5.24, `modeling_rope_utils.py`; Su et al. 2021, "RoFormer", §3.2.2.
    pub(super) fn inv_freq(&self, head_dim: usize) -> (Vec<f32>, f32) {
        let wavelengths = wave_powers(self.theta, head_dim);
        let plain = || wavelengths.iter().map(|power| 1.0 / power);
        match self.scaling {
            RopeScaling::None => (plain().collect(), 1.0),
            RopeScaling::Linear { factor } => (plain().map(|freq| freq / factor as f32).collect(), 1.0),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let original = original_max_positions as f64;
                let bend = |freq| llama3_frequency(freq, factor, low_freq_factor, high_freq_factor, original);
                (plain().map(bend).collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                truncate,
                original_max_positions,
            } => {
                let turns = |rotations| {
                    correction_dim(rotations, head_dim, self.theta, original_max_positions as f64)
                };
                let range = correction_range(turns(beta_fast), turns(beta_slow), truncate, head_dim);
                (yarn_frequencies(&wavelengths, factor as f32, range), attention_factor as f32)
            }
        }
    }
}

/// One value from two places that may both have it, if they agree.
fn agreed<T: PartialEq + ToString>(
    (field, value): (String, Option<T>),
    (other_field, other_value): (String, Option<T>),
) -> Result<Option<T>, ConfigError> {
    match (value, other_value) {
        (Some(value), Some(other)) if value != other => {
            Err(ConfigError::contradiction((field, value), (other_field, other)))
        }
        (value, other) => Ok(value.or(other)),
    }
}

/// Refuses heads of which only a part is rotated.
fn reject_partial(fields: Fields<'_>) -> Result<(), ConfigError> {
    match fields.positive("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => Err(fields.unsupported("partial_rotary_factor")),
        _ => Ok(()),
    }
}

fn parse_scaling(
    fields: Fields<'_>,
    theta: f64,
    original_max_positions: usize,
    max_positions: usize,
) -> Result<RopeScaling, ConfigError> {
    let kind = agreed(
        (fields.path("rope_type"), fields.text("rope_type")?),
        (fields.path("type"), fields.text("type")?),
    )?;
    let required =
        |key: &str| fields.positive(key)?.ok_or_else(|| ConfigError::Missing { field: fields.path(key) });
    match kind.unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: required("factor")? }),
        "llama3" => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if high <= low {
                return Err(ConfigError::contradiction(
                    (fields.path("high_freq_factor"), high),
                    (fields.path("low_freq_factor"), low),
                ));
            }
            Ok(RopeScaling::Llama3 {
                factor: required("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_positions,
            })
        }
        "yarn" => parse_yarn(fields, theta, original_max_positions, max_positions),
        _ => Err(fields.unsupported(if fields.has("rope_type") { "rope_type" } else { "type" })),
    }
}

fn parse_yarn(
    fields: Fields<'_>,
    theta: f64,
    original_max_positions: usize,
    max_positions: usize,
) -> Result<RopeScaling, ConfigError> {
    if theta == 1.0 {
        // The ramp divides by the logarithm of theta.
        return Err(ConfigError::contradiction(("rope_theta", theta), (fields.path("rope_type"), "yarn")));
    }
    let factor = match fields.positive("factor")? {
        Some(factor) => factor,
        // An explicit null means the ratio of the context lengths (DeepSeek's style).
        None if fields.has("factor") => max_positions as f64 / original_max_positions as f64,
        None => return Err(ConfigError::Missing { field: fields.path("factor") }),
    };
    let mscale = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let attention_factor = match fields.positive("attention_factor")? {
        Some(given) => given,
        None => match (fields.positive_or_zero("mscale")?, fields.positive_or_zero("mscale_all_dim")?) {
            (Some(scale), Some(all)) => mscale(scale) / mscale(all),
            _ => mscale(1.0),
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        attention_factor,
        beta_fast: fields.positive_or_zero("beta_fast")?.unwrap_or(32.0),
        beta_slow: fields.positive_or_zero("beta_slow")?.unwrap_or(1.0),
        truncate: fields.flag("truncate")?.unwrap_or(true),
        original_max_positions,
    })
}

/// `theta ^ (2i / head_dim)` for each pair `i`; base and exponent rounded to single precision first.
fn wave_powers(theta: f64, head_dim: usize) -> Vec<f32> {
    let base = f64::from(theta as f32);
    let exponent = |even: usize| even as f32 / head_dim as f32;
    (0..head_dim).step_by(2).map(|even| base.powf(f64::from(exponent(even))) as f32).collect()
}

fn llama3_frequency(freq: f32, factor: f64, low: f64, high: f64, original: f64) -> f32 {
    let wavelength = (2.0 * PI) as f32 / freq;
    if wavelength > (original / low) as f32 {
        return freq / factor as f32;
    }
    if wavelength < (original / high) as f32 {
        return freq;
    }
    let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
    (1.0 - smooth) * freq / factor as f32 + smooth * freq
}

/// The dimension, counted in pairs, that turns `rotations` times over the original context.
fn correction_dim(rotations: f64, head_dim: usize, theta: f64, original: f64) -> f64 {
    (head_dim as f64 * (original / (rotations * 2.0 * PI)).ln()) / (2.0 * theta.ln())
}

/// Where the ramp from kept to divided frequencies begins and ends.
fn correction_range(low: f64, high: f64, truncate: bool, head_dim: usize) -> (f64, f64) {
    let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, high) = (low.max(0.0), high.min((head_dim - 1) as f64));
    // A ramp without width would divide by zero.
    if low == high { (low, high + 0.001) } else { (low, high) }
}

fn yarn_frequencies(wavelengths: &[f32], factor: f32, (low, high): (f64, f64)) -> Vec<f32> {
    let blend = |(pair, power): (usize, &f32)| {
        let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let kept = 1.0 - ramp;
        (1.0 / (factor * power)) * (1.0 - kept) + (1.0 / power) * kept
    };
    wavelengths.iter().enumerate().map(blend).collect()
}
