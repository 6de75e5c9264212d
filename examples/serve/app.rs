//! What every route shares, and the routes put together.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use dormouse::control::Handle;

use crate::bodies::Gates;
use crate::chat::ChatTemplate;
use crate::groups::Groups;
use crate::http::Patience;
use crate::text::Text;
use crate::updates::Updates;
use crate::{control, edge, error, openai, sglang_generate};

/// What every route shares. A clone is a few reference counts.
#[derive(Clone)]
pub struct App {
    /// The controller that drives the engine.
    pub handle: Handle,
    /// What control routes ask for as `Authorization: Bearer ...`, if anything.
    pub token: Option<Arc<str>>,
    /// The directory below which weights may be named, if not all.
    pub weights_root: Option<Arc<PathBuf>>,
    /// The model and its text.
    pub info: Arc<Info>,
    /// What is taken in at once.
    pub gates: Arc<Gates>,
    /// Names that stand for several requests.
    pub groups: Arc<Groups>,
    /// The last transaction that was begun here.
    pub updates: Arc<Updates>,
}

impl App {
    /// For a controller and its model; without a token, with weights from anywhere.
    pub fn new(handle: Handle, info: Info) -> Self {
        let (gates, groups, updates) = Default::default();
        Self { handle, token: None, weights_root: None, info: Arc::new(info), gates, groups, updates }
    }
}

/// What does not change while the server runs.
pub struct Info {
    /// Name of the model, as `/v1/models` lists it.
    pub model: String,
    /// The text layer; without a tokenizer requests and answers are token ids.
    pub text: Option<Text>,
    /// Turns a conversation into text.
    pub chat: ChatTemplate,
    /// How long slow clients are waited for.
    pub patience: Patience,
    /// When the server started, in seconds since 1970.
    pub started: u64,
}

impl Info {
    /// Reads the text layer of a model's directory.
    ///
    /// # Errors
    /// A file that is there but can't be used.
    pub fn open(directory: &Path, model: impl Into<String>) -> Result<Self, String> {
        let (text, chat) = (Text::open(directory)?, ChatTemplate::open(directory)?);
        Ok(Self { model: model.into(), text, chat, patience: Patience::default(), started: unix_seconds() })
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl std::ops::Deref for App {
    type Target = Info;

    fn deref(&self) -> &Info {
        &self.info
    }
}

/// Every route of the server.
pub fn router(app: App) -> Router {
    let routes = Router::new()
        .merge(openai::routes())
        .merge(sglang_generate::routes())
        .merge(control::routes())
        .fallback(error::no_such_path)
        .method_not_allowed_fallback(error::no_such_method)
        .with_state(app.clone());
    // Around all of it: what a router adds by itself is seen, too.
    Router::new().fallback_service(routes).layer(axum::middleware::from_fn_with_state(app, edge::edge))
}
