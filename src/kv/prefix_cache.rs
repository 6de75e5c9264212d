//! The prefix index: finds the block that already holds given tokens after a given prefix.
//!
//! A block's key is a hash chained over the keys of the prefix, seeded with the weights digest and the
//! request's salt, so that it is also its name in a store that outlives this process. Within the process a
//! hit never rests on the hash: the tokens and the identity of the parent are compared.

use std::collections::HashMap;
use std::sync::Arc;

use super::BlockId;

/// Separates namespaces of cached prefixes: requests with different salts never share a cached block.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Salt(pub(crate) Arc<[u8]>);

/// Chained hash of a block's tokens and of everything before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockKey(pub(crate) [u8; 32]);

/// How the key of a block follows from its parent's key and its tokens. Tests inject weak ones.
pub(crate) type KeyFn = fn(&BlockKey, &[u32]) -> BlockKey;

/// The [`KeyFn`] in use: blake3 of the tokens (little-endian), keyed with the parent's key.
pub(crate) fn chained_blake3(parent: &BlockKey, tokens: &[u32]) -> BlockKey {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    BlockKey(*blake3::keyed_hash(&parent.0, &bytes).as_bytes())
}

/// Identity of one indexed content. Never used twice, so the id of an evicted parent matches nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(u64);

/// What comes before a block.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Parent {
    /// Nothing: the block is the first, in the namespace of a salt.
    Root(Option<Salt>),
    /// The content of another indexed block.
    Node(NodeId),
}

/// What an indexed block holds.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) key: BlockKey,
    pub(super) parent: Parent,
    pub(super) tokens: Box<[u32]>,
}

/// Maps (prefix, tokens) to the one block that holds them.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    weights_digest: [u8; 32],
    key_fn: KeyFn,
    /// By block; `None` for a block that is not indexed.
    nodes: Vec<Option<Node>>,
    /// By key, in order of insertion. Only looked up, never iterated over: its order decides nothing.
    buckets: HashMap<BlockKey, Vec<BlockId>>,
    next_node: u64,
}

impl PrefixIndex {
    pub(super) fn new(num_blocks: usize, weights_digest: [u8; 32], key_fn: KeyFn) -> Self {
        let nodes = std::iter::repeat_with(|| None).take(num_blocks).collect();
        Self { weights_digest, key_fn, nodes, buckets: HashMap::new(), next_node: 0 }
    }

    /// Appends the keys of the full blocks of `tokens` that `keys` doesn't have yet.
    pub(super) fn extend_keys(
        &self,
        keys: &mut Vec<BlockKey>,
        salt: Option<&Salt>,
        tokens: &[u32],
        block_size: usize,
    ) {
        for block in tokens.chunks_exact(block_size).skip(keys.len()) {
            let parent = keys.last().copied().unwrap_or_else(|| self.root_key(salt));
            keys.push((self.key_fn)(&parent, block));
        }
    }

    /// The key that stands for "nothing before": bound to the weights and to the salt.
    fn root_key(&self, salt: Option<&Salt>) -> BlockKey {
        let mut hasher = blake3::Hasher::new_derive_key("dormouse 2026-01 kv prefix root v1");
        hasher.update(&self.weights_digest);
        // An empty salt is a salt: it differs from none.
        hasher.update(&[u8::from(salt.is_some())]);
        hasher.update(salt.map_or(&[][..], |salt| &salt.0));
        BlockKey(*hasher.finalize().as_bytes())
    }

    /// The block that holds exactly `tokens` after exactly `parent`.
    pub(super) fn find(&self, key: &BlockKey, parent: &Parent, tokens: &[u32]) -> Option<BlockId> {
        let bucket = self.buckets.get(key)?;
        bucket.iter().copied().find(|&block| {
            self.node(block).is_some_and(|node| node.parent == *parent && *node.tokens == *tokens)
        })
    }

    pub(super) fn node(&self, block: BlockId) -> Option<&Node> {
        self.nodes[block.index()].as_ref()
    }

    /// Indexes a block; its content must not be indexed yet, nor may the block.
    pub(super) fn insert(&mut self, block: BlockId, key: BlockKey, parent: Parent, tokens: &[u32]) -> NodeId {
        let id = NodeId(self.next_node);
        self.next_node += 1;
        let old = self.nodes[block.index()].replace(Node { id, key, parent, tokens: tokens.into() });
        assert!(old.is_none(), "block {} is indexed twice", block.0);
        self.buckets.entry(key).or_default().push(block);
        id
    }

    /// Forgets what a block holds, if it was indexed.
    pub(super) fn remove(&mut self, block: BlockId) {
        let Some(node) = self.nodes[block.index()].take() else { return };
        if let Some(bucket) = self.buckets.get_mut(&node.key) {
            bucket.retain(|&other| other != block);
            if bucket.is_empty() {
                self.buckets.remove(&node.key);
            }
        }
    }

    /// Forgets everything. Ids go on from where they were.
    pub(super) fn clear(&mut self) {
        self.buckets.clear();
        self.nodes.fill_with(|| None);
    }

    /// The indexed blocks, in the order of block ids.
    pub(super) fn indexed(&self) -> impl Iterator<Item = (BlockId, &Node)> {
        (0u32..).zip(&self.nodes).filter_map(|(block, node)| Some((BlockId(block), node.as_ref()?)))
    }

    /// How often `block` is among the entries of `key`.
    pub(super) fn bucket_entries(&self, key: &BlockKey, block: BlockId) -> usize {
        self.buckets.get(key).map_or(0, |bucket| bucket.iter().filter(|&&other| other == block).count())
    }

    /// Entries of the map, over all keys.
    pub(super) fn num_entries(&self) -> usize {
        self.buckets.values().map(Vec::len).sum()
    }
}
