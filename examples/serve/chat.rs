//! Turns a conversation into the text that the model continues.

use std::io::Write;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize as _;
use serde_json::Value as Json;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// The template of a model that brings none: what was said, and nothing else. It suits models that were not
/// trained to chat, and invents no roles for those that were.
const DEFAULT: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";
const NAME: &str = "chat";

/// A model's chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    own: bool,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or else the `chat_template` of `tokenizer_config.json`; without either a
    /// conversation becomes the contents of its messages, one after another.
    ///
    /// # Errors
    /// A file that is there but can't be used.
    pub fn open(directory: &Path) -> Result<Self, String> {
        let config = read(&directory.join("tokenizer_config.json"))?;
        let config = config.as_deref().map(serde_json::from_str::<Json>).transpose();
        let config = config.map_err(|error| format!("tokenizer_config.json: {error}"))?.unwrap_or_default();
        let file = read(&directory.join("chat_template.jinja"))?;
        let source = file.or_else(|| configured(&config["chat_template"]));
        let own = source.is_some();
        let mut environment = Environment::new();
        // As Hugging Face renders templates.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", refuse);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, source.unwrap_or_else(|| DEFAULT.to_owned()))
            .map_err(|error| format!("the chat template: {error:#}"))?;
        let token = |name: &str| special(&config[name]).unwrap_or_default();
        Ok(Self { bos: token("bos_token"), eos: token("eos_token"), own, environment })
    }

    /// Whether the model brings its template. Such a one spells the tokens that begin a text itself.
    pub fn is_own(&self) -> bool {
        self.own
    }

    /// Text of a conversation.
    ///
    /// # Errors
    /// What the template has against it.
    pub fn render(&self, messages: &[Json], more: &Json, prompt: bool) -> Result<String, String> {
        let template = self.environment.get_template(NAME).map_err(|error| error.to_string())?;
        let base = context! {
            messages => Serde(messages), add_generation_prompt => prompt,
            bos_token => self.bos.as_str(), eos_token => self.eos.as_str(),
        };
        let more = if more.is_object() {
            Serde(more).into()
        } else {
            context! {}
        };
        // What is named twice is the server's.
        template.render(context! { ..base, ..more }).map_err(|error| match error.detail() {
            Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_owned(),
            _ => error.to_string(),
        })
    }
}

fn refuse(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// As Python writes it, which is what models were trained on; minijinja's own escapes for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    let mut out = Vec::new();
    let written = match indent.map(|width| " ".repeat(width.min(16))) {
        Some(indent) => {
            let pretty = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine)),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// JSON with a space after commas and colons.
struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

fn read(path: &Path) -> Result<Option<String>, String> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// The template of a configuration: one, or the default among several.
fn configured(value: &Json) -> Option<String> {
    match value {
        Json::String(template) => Some(template.clone()),
        Json::Array(named) => {
            let default = named.iter().find(|one| one["name"] == "default").or(named.first())?;
            Some(default["template"].as_str()?.to_owned())
        }
        _ => None,
    }
}

/// A special token of a configuration: its text, or an object with it.
fn special(value: &Json) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}
