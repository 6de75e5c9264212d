//! How a trainer's tensor names become the checkpoint's.
//!
//! Everything matches whole path components, the parts between dots: `layers.1` says nothing of `layers.10`,
//! nor `module` of `my_module`.

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;

/// What a trainer calls its tensors, in terms of Hugging Face names. [`Default`] leaves every name alone.
///
/// A name goes through these steps, each once and in this order, so that nothing is rewritten twice:
///
/// 1. components are removed, wherever they stand ([`strip_component`](NameMap::strip_component));
/// 2. leading components are removed, prefix by prefix ([`strip_prefix`](NameMap::strip_prefix));
/// 3. tensors that no one needs are dropped ([`ignore`](NameMap::ignore),
///    [`ignore_under`](NameMap::ignore_under)): if the name as it was sent matches, or what is left of it;
/// 4. what is left of the name may be given another one ([`rename`](NameMap::rename)).
///
/// A name that would lose all its components keeps them. Two names that become the same are two tensors of
/// one name, which a load refuses.
///
/// ```
/// use dormouse::NameMap;
///
/// let names = NameMap::wrappers().ignore("rotary_emb.inv_freq").rename("score.weight", "lm_head.weight");
/// let sent = "module._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight";
/// assert_eq!(names.apply(sent).as_deref(), Some("model.layers.0.mlp.up_proj.weight"));
/// assert_eq!(names.apply("module.score.weight").as_deref(), Some("lm_head.weight"));
/// assert_eq!(names.apply("model.layers.0.self_attn.rotary_emb.inv_freq"), None);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NameMap {
    components: Vec<String>,
    prefixes: Vec<Prefix>,
    ignored: Vec<String>,
    ignored_trees: Vec<String>,
    renamed: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Prefix {
    components: String,
    /// Removed as often as it stands there, not once.
    repeated: bool,
}

/// What becomes of a tensor that a trainer sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mapped<'a> {
    /// It is the tensor of this name.
    Tensor(Cow<'a, str>),
    /// It is received and dropped.
    Ignored,
}

impl NameMap {
    /// Removes what the usual training wrappers put into names.
    ///
    /// - FSDP, `torch.compile` and activation checkpointing: the components `_fsdp_wrapped_module`,
    ///   `_orig_mod` and `_checkpoint_wrapped_module`;
    /// - PEFT: the component `base_layer` and, after any `module`, the prefix `base_model.model`;
    /// - DDP and DeepSpeed: the prefix `module`, as often as it stands at the front.
    #[must_use]
    pub fn wrappers() -> Self {
        let module = Prefix { components: "module".into(), repeated: true };
        Self { prefixes: vec![module], ..Self::default() }
            .strip_component("_fsdp_wrapped_module")
            .strip_component("_orig_mod")
            .strip_component("_checkpoint_wrapped_module")
            .strip_component("base_layer")
            .strip_prefix("base_model.model")
    }

    /// Removes a component, such as `_fsdp_wrapped_module`, wherever it stands in a name and however often.
    /// Several, joined by dots, are removed where they stand in a row.
    #[must_use]
    pub fn strip_component(mut self, component: impl Into<String>) -> Self {
        self.components.push(component.into());
        self
    }

    /// Removes leading components, such as `base_model.model`, once. Prefixes are tried in the order in which
    /// they were given, each on what the one before has left; one given twice is removed up to twice.
    #[must_use]
    pub fn strip_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefixes.push(Prefix { components: prefix.into(), repeated: false });
        self
    }

    /// Drops tensors whose name is `name` or ends in its components: `rotary_emb.inv_freq` drops that of
    /// every layer.
    #[must_use]
    pub fn ignore(mut self, name: impl Into<String>) -> Self {
        self.ignored.push(name.into());
        self
    }

    /// Drops tensors whose name is `tree` or begins with its components: `vision_tower` drops
    /// `vision_tower.proj.weight`, and not `model.vision_tower.proj.weight`.
    #[must_use]
    pub fn ignore_under(mut self, tree: impl Into<String>) -> Self {
        self.ignored_trees.push(tree.into());
        self
    }

    /// Gives the tensor that is called `from`, after stripping, the name `to`. The whole name must match. The
    /// new name is final. Of two rules for one name the later holds.
    #[must_use]
    pub fn rename(mut self, from: impl Into<String>, to: impl Into<String>) -> Self {
        self.renamed.insert(from.into(), to.into());
        self
    }

    /// The name that a tensor sent as `name` has in the checkpoint; `None` if it is dropped.
    pub fn apply(&self, name: &str) -> Option<String> {
        match self.map(name) {
            Mapped::Tensor(name) => Some(name.into_owned()),
            Mapped::Ignored => None,
        }
    }

    /// As [`apply`](NameMap::apply), without a copy where the name stays or only loses a prefix.
    pub(crate) fn map<'a>(&self, name: &'a str) -> Mapped<'a> {
        let stripped = self.strip(name);
        if self.ignores(name) || self.ignores(&stripped) {
            return Mapped::Ignored;
        }
        Mapped::Tensor(self.renamed(stripped))
    }

    /// Steps 1 and 2: what is left of a name as it was sent.
    pub(crate) fn strip<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match self.strip_components(name) {
            Cow::Borrowed(name) => self.strip_prefixes(name).into(),
            Cow::Owned(name) => self.strip_prefixes(&name).to_owned().into(),
        }
    }

    /// Step 3, for one spelling of a name.
    pub(crate) fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| ends_with(name, ignored))
            || self.ignored_trees.iter().any(|tree| starts_with(name, tree))
    }

    /// Step 4: the final name of a stripped one.
    pub(crate) fn renamed<'a>(&self, stripped: Cow<'a, str>) -> Cow<'a, str> {
        match self.renamed.get(stripped.as_ref()) {
            Some(to) => to.clone().into(),
            None => stripped,
        }
    }

    fn strip_components<'a>(&self, name: &'a str) -> Cow<'a, str> {
        if self.components.is_empty() {
            return name.into();
        }
        let mut kept: Option<String> = None;
        let mut stripped = false;
        let mut rest = Some(name);
        while let Some(left) = rest {
            if let Some(component) = self.components.iter().find(|component| starts_with(left, component)) {
                stripped = true;
                rest = after(left, component);
                continue;
            }
            let (component, others) = match left.split_once('.') {
                Some((component, others)) => (component, Some(others)),
                None => (left, None),
            };
            match &mut kept {
                Some(kept) => kept.extend([".", component]),
                None => kept = Some(component.to_owned()),
            }
            rest = others;
        }
        kept.filter(|_| stripped).map_or(name.into(), Cow::Owned)
    }

    fn strip_prefixes<'a>(&self, mut name: &'a str) -> &'a str {
        for prefix in &self.prefixes {
            while let Some(rest) = after(name, &prefix.components) {
                name = rest;
                if !prefix.repeated {
                    break;
                }
            }
        }
        name
    }
}

/// What follows leading components and their dot. No components are none, not an empty one.
fn after<'a>(name: &'a str, components: &str) -> Option<&'a str> {
    if components.is_empty() {
        return None;
    }
    name.strip_prefix(components)?.strip_prefix('.')
}

fn starts_with(name: &str, components: &str) -> bool {
    !components.is_empty() && (name == components || after(name, components).is_some())
}

fn ends_with(name: &str, components: &str) -> bool {
    let Some(rest) = name.strip_suffix(components) else { return false };
    !components.is_empty() && (rest.is_empty() || rest.ends_with('.'))
}
