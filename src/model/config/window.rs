//! Which layers see only a window of the last tokens.

use super::fields::Fields;
use super::{ConfigError, MAX_POSITIONS, ModelFamily};

/// Window of Mistral and, once switched on, of Qwen where `sliding_window` is absent, in tokens.
const DEFAULT_WINDOW: usize = 4096;
/// First windowed layer of Qwen where `max_window_layers` is absent.
const DEFAULT_MAX_WINDOW_LAYERS: usize = 28;

/// The window of each layer in tokens, the query's own included; `None` sees the whole context.
pub(super) fn parse_windows(
    config: Fields<'_>,
    family: ModelFamily,
    num_layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let window = || -> Result<Option<usize>, ConfigError> {
        let given = config.size("sliding_window", MAX_POSITIONS)?;
        Ok(if config.has("sliding_window") { given } else { Some(DEFAULT_WINDOW) })
    };
    let layer_types = layer_types(config, num_layers)?;
    match family {
        ModelFamily::Llama => agree(config, layer_types, vec![None; num_layers]),
        ModelFamily::Mistral => agree(config, layer_types, vec![window()?; num_layers]),
        ModelFamily::Qwen2 | ModelFamily::Qwen3 => {
            let switched_on = config.flag("use_sliding_window")?.unwrap_or(false);
            let window = if switched_on { window()? } else { None };
            let first = config.count("max_window_layers", usize::MAX)?.unwrap_or(DEFAULT_MAX_WINDOW_LAYERS);
            match (layer_types, window) {
                (None, _) => Ok((0..num_layers).map(|layer| window.filter(|_| layer >= first)).collect()),
                (Some(slides), None) if slides.contains(&true) => Err(ConfigError::contradiction(
                    ("layer_types", "sliding_attention"),
                    if switched_on { ("sliding_window", "null") } else { ("use_sliding_window", "false") },
                )),
                (Some(slides), _) => Ok(slides.iter().map(|&slide| window.filter(|_| slide)).collect()),
            }
        }
    }
}

/// For each layer whether it slides, if `layer_types` is there.
fn layer_types(config: Fields<'_>, num_layers: usize) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(types) = config.texts("layer_types")? else { return Ok(None) };
    if types.len() != num_layers {
        return Err(ConfigError::contradiction(
            ("layer_types", format_args!("a list of {}", types.len())),
            ("num_hidden_layers", num_layers),
        ));
    }
    let slides = |kind: &&str| match *kind {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        _ => Err(config.unsupported("layer_types")),
    };
    types.iter().map(slides).collect::<Result<_, _>>().map(Some)
}

/// Families whose transformers code ignores `layer_types`: it may be there, but not say anything else.
fn agree(
    config: Fields<'_>,
    layer_types: Option<Vec<bool>>,
    windows: Vec<Option<usize>>,
) -> Result<Vec<Option<usize>>, ConfigError> {
    match layer_types {
        Some(slides) if !slides.iter().copied().eq(windows.iter().map(Option::is_some)) => {
            Err(config.unsupported("layer_types"))
        }
        _ => Ok(windows),
    }
}
