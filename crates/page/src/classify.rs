//! What a name means by the place where it stands (the tree of the mount).

use serde::{Deserialize, Serialize};

use crate::names::{self, LayerEntry};

/// What a directory is for; decided by its place when it is made. Stores keep it on record: variants are
/// only appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DirectoryClass {
    /// The mount's root.
    Root,
    /// `models/`
    Models,
    /// `models/NAME/`
    Model,
    /// `models/NAME/sequences/`
    Sequences,
    /// `models/NAME/sequences/NAME/`
    Sequence,
    /// `.../sequences/NAME/LAYER/`
    Layer(u32),
    /// `files/`, everything below it, and staging directories elsewhere.
    Plain,
}

/// What a name for a file means in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileClass {
    /// An ordinary file.
    Plain,
    /// A page that starts at this token.
    Page(u64),
    /// The state of a recurrent layer after that many tokens, where the manifest says what it consists
    /// of; else an ordinary file, see [`FileClass::in_model`].
    State(u64),
    /// The open page that starts at this token.
    Tail(u64),
    /// Token ids of a sequence.
    Tokens,
    /// A model's manifest.
    Manifest,
    /// Cannot be made.
    Reserved,
}

impl FileClass {
    /// The name appears by publishing, not by creating.
    pub fn is_sealed(self) -> bool {
        matches!(self, FileClass::Page(_) | FileClass::State(_) | FileClass::Manifest)
    }

    /// The same in a model that does, or does not, say what its states consist of. What an engine keeps
    /// in one that nobody describes is its own business.
    #[must_use]
    pub fn in_model(self, describes_states: bool) -> FileClass {
        match self {
            FileClass::State(_) if !describes_states => FileClass::Plain,
            class => class,
        }
    }
}

/// What a file of that name would be.
pub fn file(parent: DirectoryClass, name: &[u8]) -> FileClass {
    if names::is_staging(name) {
        return if parent == DirectoryClass::Root { FileClass::Reserved } else { FileClass::Plain };
    }
    match parent {
        DirectoryClass::Root => FileClass::Reserved,
        DirectoryClass::Model => match name {
            name if name == names::MANIFEST.as_bytes() => FileClass::Manifest,
            name if is_reserved_in_model(name) => FileClass::Reserved,
            _ => FileClass::Plain,
        },
        DirectoryClass::Sequence if name == names::TOKENS.as_bytes() => FileClass::Tokens,
        DirectoryClass::Layer(_) => match names::layer_entry(name) {
            LayerEntry::Page(start) => FileClass::Page(start.0),
            LayerEntry::Tail(start) => FileClass::Tail(start.0),
            LayerEntry::State(row) => FileClass::State(row.0),
            LayerEntry::Staging | LayerEntry::Other => FileClass::Plain,
        },
        _ => FileClass::Plain,
    }
}

/// Whether an ordinary file may have that name, and nothing else: whoever looks into the sequence reads it, and a FIFO would
/// keep him waiting, a link lead him elsewhere.
pub fn is_regular_only(parent: DirectoryClass, name: &[u8]) -> bool {
    parent == DirectoryClass::Sequence && name == names::POSITIONS.as_bytes()
}

/// What a directory of that name would be; `None` where none can be made.
pub fn directory(parent: DirectoryClass, name: &[u8]) -> Option<DirectoryClass> {
    if names::is_staging(name) {
        return (parent != DirectoryClass::Root).then_some(DirectoryClass::Plain);
    }
    Some(match parent {
        DirectoryClass::Root => return None,
        DirectoryClass::Models => DirectoryClass::Model,
        DirectoryClass::Model if name == names::SEQUENCES.as_bytes() => DirectoryClass::Sequences,
        DirectoryClass::Model
            if is_reserved_in_model(name) || name == names::MANIFEST.as_bytes() =>
        {
            return None;
        }
        DirectoryClass::Sequences => DirectoryClass::Sequence,
        DirectoryClass::Sequence if name == names::TOKENS.as_bytes() => return None,
        DirectoryClass::Sequence => match names::parse_layer(name) {
            Some(layer) => DirectoryClass::Layer(layer.0),
            None => DirectoryClass::Plain,
        },
        DirectoryClass::Layer(_) => match names::layer_entry(name) {
            LayerEntry::Staging | LayerEntry::Other => DirectoryClass::Plain,
            _ => return None,
        },
        DirectoryClass::Model | DirectoryClass::Plain => DirectoryClass::Plain,
    })
}

/// Whether names come and go there by what the daemon does, so that the kernel must ask anew.
pub fn changes_by_itself(class: DirectoryClass) -> bool {
    !matches!(class, DirectoryClass::Root | DirectoryClass::Plain)
}

fn is_reserved_in_model(name: &[u8]) -> bool {
    [names::PREFIXES, names::SLOTS, names::BLOCKS, names::SEQUENCES]
        .iter()
        .any(|reserved| name == reserved.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_what_its_place_says() {
        fn check(parent: DirectoryClass, name: &str, expected: FileClass) {
            assert_eq!(file(parent, name.as_bytes()), expected, "{name} in {parent:?}");
        }
        use DirectoryClass::{Layer, Model, Models, Plain, Root, Sequence};
        check(Root, "anything", FileClass::Reserved);
        check(Models, "README", FileClass::Plain);
        check(Model, "manifest.json", FileClass::Manifest);
        check(Model, ".manifest.json.x7", FileClass::Plain);
        check(Model, "slots", FileClass::Reserved);
        check(Model, "notes.txt", FileClass::Plain);
        check(Sequence, "tokens", FileClass::Tokens);
        check(Sequence, "tokens.tmp", FileClass::Plain);
        check(Layer(0), "0001024.safetensors", FileClass::Page(1024));
        check(Layer(0), ".0001024.safetensors.q1", FileClass::Plain);
        check(Layer(0), "0002048.tail", FileClass::Tail(2048));
        check(Layer(0), "1024.safetensors", FileClass::Plain);
        check(Layer(0), "state-0001024.safetensors", FileClass::State(1024));
        check(Layer(0), "state-1024.safetensors", FileClass::Plain);
        check(Plain, "state-0001024.safetensors", FileClass::Plain);
        check(Plain, "0001024.safetensors", FileClass::Plain);
    }

    #[test]
    fn a_state_that_nobody_describes_is_an_ordinary_file() {
        let state = file(DirectoryClass::Layer(0), b"state-0001024.safetensors");
        assert_eq!(state.in_model(true), FileClass::State(1024));
        assert_eq!(state.in_model(false), FileClass::Plain);
        assert!(state.is_sealed() && !state.in_model(false).is_sealed());
        assert_eq!(FileClass::Page(0).in_model(false), FileClass::Page(0));
    }

    #[test]
    fn a_directory_is_what_its_place_says() {
        fn check(parent: DirectoryClass, name: &str, expected: Option<DirectoryClass>) {
            assert_eq!(directory(parent, name.as_bytes()), expected, "{name} in {parent:?}");
        }
        use DirectoryClass::{Layer, Model, Models, Plain, Root, Sequence, Sequences};
        check(Root, "x", None);
        check(Models, "llama", Some(Model));
        check(Models, ".llama", Some(Plain));
        check(Model, "sequences", Some(Sequences));
        check(Model, "prefixes", None);
        check(Sequences, "chat", Some(Sequence));
        check(Sequence, "007", Some(Layer(7)));
        check(Sequence, "7", Some(Plain));
        check(Layer(7), "0000000.safetensors", None);
        check(Plain, "sequences", Some(Plain));
    }
}
