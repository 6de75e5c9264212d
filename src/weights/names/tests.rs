use proptest::prelude::*;

use super::*;

fn sent(names: &NameMap, name: &str) -> String {
    names.apply(name).unwrap_or_else(|| "(ignored)".into())
}

#[test]
fn the_default_leaves_every_name_alone_without_a_copy() {
    for name in ["model.layers.0.mlp.up_proj.weight", "module.x", "_orig_mod", "", ".", "a..b", "x."] {
        assert!(matches!(NameMap::default().map(name), Mapped::Tensor(Cow::Borrowed(same)) if same == name));
    }
    // Only a prefix goes: still no copy.
    assert!(matches!(NameMap::wrappers().map("module.a"), Mapped::Tensor(Cow::Borrowed("a"))));
}

#[test]
fn b24_the_usual_wrappers_are_removed() {
    let names = NameMap::wrappers();
    let plain = "model.layers.0.self_attn.q_proj.weight";
    for wrapped in [
        "model.layers.0.self_attn.q_proj.weight",
        "module.model.layers.0.self_attn.q_proj.weight",
        "module.module.model.layers.0.self_attn.q_proj.weight",
        "_orig_mod.model.layers.0.self_attn.q_proj.weight",
        "module._orig_mod.module.model.layers.0.self_attn.q_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.weight",
        "model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn.q_proj.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
        "module._fsdp_wrapped_module.base_model.model.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.\
         base_layer.weight",
    ] {
        assert_eq!(sent(&names, wrapped), plain, "{wrapped}");
    }
    // A model without a head of its own name for the body: one prefix less.
    assert_eq!(sent(&names, "base_model.model.lm_head.weight"), "lm_head.weight");
    // An adapter's tensors have no counterpart: they keep names that a load lists as unknown.
    let adapter = sent(&names, "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight");
    assert_eq!(adapter, "model.layers.0.mlp.up_proj.lora_A.default.weight");
}

#[test]
fn b25_only_whole_components_match() {
    let names = NameMap::wrappers()
        .strip_prefix("model.layers.1")
        .ignore("q_proj.weight")
        .ignore_under("vision")
        .rename("layers.1", "renamed");
    for name in [
        "my_module.x",
        "modules.x",
        "a.module.x",
        "_orig_module.x",
        "a._orig_mod_.x",
        "base_model.models.x",
        "base_layers.x",
        "model.layers.10.x",
        "my_q_proj.weight",
        "q_proj.weight.x",
        "vision_tower.x",
        "model.vision.x",
        "layers.10",
        "layers.1.x",
        "x.layers.1",
    ] {
        assert_eq!(sent(&names, name), name);
    }
    assert_eq!(sent(&names, "model.layers.1.x"), "x");
    for ignored in ["q_proj.weight", "a.q_proj.weight", "vision", "vision.x.y"] {
        assert_eq!(names.apply(ignored), None);
    }
}

#[test]
fn b25_a_new_name_is_final() {
    let names = NameMap::default()
        .strip_component("c")
        .strip_prefix("p")
        .ignore("dropped")
        .rename("a", "b")
        .rename("b", "p.c.dropped")
        .rename("qkv_proj", "fused.qkv_proj")
        .rename("fused.qkv_proj", "twice");
    assert_eq!(sent(&names, "a"), "b");
    assert_eq!(sent(&names, "p.c.b"), "p.c.dropped");
    assert_eq!(sent(&names, "qkv_proj"), "fused.qkv_proj");
    assert_eq!(sent(&names.rename("a", "later"), "p.a"), "later");
}

#[test]
fn steps_go_in_their_order() {
    // Components before prefixes: what stands between the parts of a prefix doesn't hide it.
    let names = NameMap::default().strip_prefix("base.model").strip_component("w");
    assert_eq!(sent(&names, "base.w.model.w.x"), "x");
    // Prefixes once each, in the order given.
    let names = NameMap::default().strip_prefix("a").strip_prefix("b");
    assert_eq!(sent(&names, "a.b.a.b.x"), "a.b.x");
    assert_eq!(sent(&names, "b.a.x"), "a.x");
    assert_eq!(sent(&names.strip_prefix("a"), "a.b.a.a.x"), "a.x");
    // Ignored as sent, or as stripped, and before a new name is given.
    let names =
        NameMap::default().strip_prefix("p").ignore("p.sent").ignore_under("tree").rename("r", "tree.r");
    for name in ["p.sent", "x.p.sent", "p.tree.x", "tree.x", "p.tree"] {
        assert_eq!(names.apply(name), None, "{name}");
    }
    assert_eq!(sent(&names, "sent"), "sent");
    assert_eq!(sent(&names, "p.r"), "tree.r");
}

#[test]
fn a_name_is_never_stripped_to_nothing_and_an_empty_rule_matches_nothing() {
    let names = NameMap::wrappers().strip_component("a.b");
    for name in ["module", "base_model.model", "_orig_mod", "_orig_mod._orig_mod", "a.b", ""] {
        assert_eq!(sent(&names, name), name);
    }
    assert_eq!(sent(&names, "module.module"), "module");
    assert_eq!(sent(&names, "x.a.b.a.y.a.b"), "x.a.y");
    let empty = NameMap::default().strip_component("").strip_prefix("").ignore("").ignore_under("");
    for name in ["", ".", "..", ".x", "x.", "a..b"] {
        assert_eq!(sent(&empty, name), name);
    }
}

proptest! {
    /// Against a map that works on lists of components.
    #[test]
    fn any_name_is_mapped_as_its_list_of_components_is(
        name in "[ab]{0,2}(\\.[abm]{0,2}){0,6}",
        component in "[ab]{1,2}",
        prefix in "[ab]{1,2}(\\.[ab]{1,2}){0,1}",
        ignored in "[ab]{1,2}(\\.[ab]{1,2}){0,1}",
        tree in "[ab]{1,2}(\\.[ab]{1,2}){0,1}",
    ) {
        let names = NameMap::default()
            .strip_component(&component)
            .strip_prefix(&prefix)
            .ignore(&ignored)
            .ignore_under(&tree);
        let split = |name: &str| name.split('.').map(str::to_owned).collect::<Vec<String>>();
        let all = split(&name);
        let mut left: Vec<String> = all.iter().filter(|part| **part != component).cloned().collect();
        if left.is_empty() {
            left = all.clone();
        }
        let prefix = split(&prefix);
        if left.len() > prefix.len() && left.starts_with(&prefix) {
            left.drain(..prefix.len());
        }
        let dropped = [&all, &left]
            .iter()
            .any(|name| name.ends_with(&split(&ignored)) || name.starts_with(&split(&tree)));
        prop_assert_eq!(names.apply(&name), (!dropped).then(|| left.join(".")));
    }
}
