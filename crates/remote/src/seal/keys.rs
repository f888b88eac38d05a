//! The keys of a sealed remote, and what is derived from them.
//!
//! ```text
//! kvfs-remote-key 1
//! key <id: 16 hex> <secret: 64 hex>
//! ```
//!
//! The first key writes, all of them read. The id follows from the secret, so a mistyped character
//! is noticed. Secrets are used for nothing but derivation, by purpose and remote: what is known of
//! one remote or one purpose tells nothing about another.

use std::fmt;
use std::io;
use std::str::FromStr;

use crate::marker::RemoteId;

/// First line of a key file.
const FIRST_LINE: &str = "kvfs-remote-key 1";
/// Every key costs one more request where an object is not found under the newer ones.
const KEYS_MAX: usize = 8;
const SECRET_BYTES: usize = 32;

const ID_CONTEXT: &str = "kvfs 2026-11-23 id of a key of sealed remotes";
const CHECK_CONTEXT: &str = "kvfs 2026-11-23 check value in the marker of a sealed remote";
const NAMES_CONTEXT: &str = "kvfs 2026-11-23 names of objects in a sealed remote";
const CONTENTS_CONTEXT: &str = "kvfs 2026-11-23 contents of objects in a sealed remote";

/// Tells keys apart; no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyId(pub u64);

impl fmt::Display for KeyId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

struct Key {
    id: KeyId,
    secret: [u8; SECRET_BYTES],
}

/// One key or several, of which the first writes.
pub struct KeyRing(Vec<Key>);

/// What one key gives for one remote.
pub struct Subkeys {
    pub(super) id: KeyId,
    pub(super) names: [u8; 32],
    pub(super) contents: [u8; 32],
}

/// Without the secrets.
impl fmt::Debug for KeyRing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.0.iter().map(|key| key.id)).finish()
    }
}

/// Without the secrets.
impl fmt::Debug for Subkeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Subkeys({})", self.id)
    }
}

impl Key {
    fn new(secret: [u8; SECRET_BYTES]) -> Key {
        let derived = blake3::derive_key(ID_CONTEXT, &secret);
        let (id, _) = derived.split_first_chunk().expect("32 bytes");
        Key { id: KeyId(u64::from_be_bytes(*id)), secret }
    }

    fn derive(&self, context: &str, remote: RemoteId) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&self.secret).update(&remote.0.to_le_bytes());
        *hasher.finalize().as_bytes()
    }
}

impl KeyRing {
    /// The text of a key file with one new key, of the kernel's random bytes.
    pub fn generate() -> io::Result<String> {
        let mut secret = [0; SECRET_BYTES];
        random(&mut secret)?;
        Ok(KeyRing(vec![Key::new(secret)]).reveal())
    }

    /// The text of a key file with these keys.
    pub fn reveal(&self) -> String {
        let line = |key: &Key| format!("key {} {}\n", key.id, hexadecimal(&key.secret));
        std::iter::once(format!("{FIRST_LINE}\n")).chain(self.0.iter().map(line)).collect()
    }

    /// Ids of the keys; the first one writes.
    pub fn ids(&self) -> impl Iterator<Item = KeyId> {
        self.0.iter().map(|key| key.id)
    }

    /// What the marker of a remote holds of a key, if the ring has it.
    pub(crate) fn check(&self, id: KeyId, remote: RemoteId) -> Option<[u8; 32]> {
        let key = self.0.iter().find(|key| key.id == id)?;
        Some(key.derive(CHECK_CONTEXT, remote))
    }

    /// In the order of the keys.
    pub fn subkeys(&self, remote: RemoteId) -> Vec<Subkeys> {
        let derive = |key: &Key| Subkeys {
            id: key.id,
            names: key.derive(NAMES_CONTEXT, remote),
            contents: key.derive(CONTENTS_CONTEXT, remote),
        };
        self.0.iter().map(derive).collect()
    }
}

impl FromStr for KeyRing {
    type Err = String;

    /// The error names the line, and nothing of what it holds.
    fn from_str(text: &str) -> Result<KeyRing, String> {
        let mut keys: Vec<Key> = Vec::new();
        let mut is_first = true;
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if std::mem::take(&mut is_first) {
                if line != FIRST_LINE {
                    return Err(format!("line {}: must be {FIRST_LINE:?}", index + 1));
                }
                continue;
            }
            let key = parse_key(line).map_err(|why| format!("line {}: {why}", index + 1))?;
            if keys.iter().any(|known| known.id == key.id) {
                return Err(format!("line {}: the key is there twice", index + 1));
            }
            keys.push(key);
        }
        match keys.len() {
            0 => Err("holds no key: make one with kvfs remote keygen".to_owned()),
            1..=KEYS_MAX => Ok(KeyRing(keys)),
            count => Err(format!("holds {count} keys, at most {KEYS_MAX} are read")),
        }
    }
}

fn parse_key(line: &str) -> Result<Key, &'static str> {
    const SHAPE: &str = "must be key, an id of 16 and a secret of 64 hexadecimal digits";
    let mut words = line.split_whitespace();
    let (Some("key"), Some(id), Some(secret), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(SHAPE);
    };
    let secret = blake3::Hash::from_hex(secret).map_err(|_| SHAPE)?;
    let key = Key::new(*secret.as_bytes());
    if key.id.to_string() == id { Ok(key) } else { Err("id and secret do not belong together") }
}

/// The kernel's random bytes.
pub(super) fn random(bytes: &mut [u8]) -> io::Result<()> {
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, bytes)
}

pub(crate) fn hexadecimal(bytes: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*bytes).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_is_read_back_and_anything_else_is_refused_in_one_line() {
        fn check(text: &str, expected: &str) {
            let error = text.parse::<KeyRing>().unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
        let (one, two) = (KeyRing::generate().unwrap(), KeyRing::generate().unwrap());
        assert_ne!(one, two);
        let ring: KeyRing = format!("# of the cluster\n\n{one}").parse().unwrap();
        let second = two.lines().nth(1).unwrap();
        let both: KeyRing = format!("{one}{second}\n").parse().unwrap();
        assert_eq!(both.ids().next(), ring.ids().next());
        assert_eq!(both.ids().count(), 2);
        let again: KeyRing = both.reveal().parse().unwrap();
        assert_eq!(again.ids().collect::<Vec<_>>(), both.ids().collect::<Vec<_>>());
        let secret = one.split_whitespace().last().unwrap();
        assert!(!format!("{both:?}").contains(secret));

        check("", "holds no key");
        check("kvfs-remote-key 2\n", "line 1");
        check(second, "line 1");
        check(&format!("{one}{}", one.lines().nth(1).unwrap()), "line 3: the key is there twice");
        check(&format!("{one}key 12"), "line 3: must be key");
        let (head, last) = one.trim_end().split_at(one.len() - 2);
        let other = if last == "0" { "1" } else { "0" };
        check(&format!("{head}{other}"), "line 2: id and secret do not belong together");
        let many: Vec<String> = (0..=KEYS_MAX)
            .map(|_| KeyRing::generate().unwrap().lines().nth(1).unwrap().to_owned())
            .collect();
        check(&format!("{FIRST_LINE}\n{}", many.join("\n")), "at most 8");
    }

    #[test]
    fn every_purpose_and_remote_has_keys_of_its_own() {
        let ring: KeyRing = KeyRing::generate().unwrap().parse().unwrap();
        let mut all = Vec::new();
        for remote in [RemoteId(1), RemoteId(2)] {
            let subkeys = &ring.subkeys(remote)[0];
            all.extend([subkeys.names, subkeys.contents, ring.check(subkeys.id, remote).unwrap()]);
        }
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 6);
        assert_eq!(ring.check(KeyId(7), RemoteId(1)), None);
    }
}
