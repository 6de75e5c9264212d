//! Lines of what happens, on stderr: each control request at its receipt and its outcome, generations that failed.

use tracing::Level;
use tracing_subscriber::fmt::{MakeWriter, Subscriber};

/// A level by its name.
///
/// # Errors
/// There is no such level.
pub fn level(name: &str) -> Result<Level, String> {
    match name {
        "error" => Ok(Level::ERROR),
        "warn" => Ok(Level::WARN),
        "info" => Ok(Level::INFO),
        "debug" => Ok(Level::DEBUG),
        _ => Err(format!("--log must be error, warn, info or debug, not {name:?}")),
    }
}

/// Writes lines up to a level.
pub fn subscriber<W>(level: Level, writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    Subscriber::builder().with_ansi(false).with_max_level(level).with_writer(writer).finish()
}

/// Begins to write to stderr.
pub fn install(level: Level) {
    // Somebody who has set one up before wants that one.
    let _ = tracing::subscriber::set_global_default(subscriber(level, std::io::stderr));
}
