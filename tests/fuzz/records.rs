//! The values that `meta.redb` holds, one by one.

use kvfs::store::event::{Event, EventHeads, What};
use kvfs::store::record::{DirectoryClass, FileRecord, Kind};
use kvfs::store::record::{
    EncodedCopy, Entry, IndexedPage, IndexedTokens, Inode, InodeId, ObjectKind, ObjectRecord,
    RemoteCopy, RemoteIdentity, RemoteState, Role, Time, Totals,
};
use kvfs::tier::encoding::Encoding;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::engine::{Outcome, Target};

fn inode(kind: Kind) -> Inode {
    let time = Time { seconds: -5, nanoseconds: 999_999_999 };
    let (atime, mtime, ctime) = (time, time, time);
    Inode { kind, mode: 0o640, uid: 1000, gid: 70_000, links: 2, atime, mtime, ctime }
}

fn seeds() -> Vec<Vec<u8>> {
    fn seed(kind: u8, value: &impl Serialize) -> Vec<u8> {
        [vec![kind], postcard::to_stdvec(value).unwrap()].concat()
    }
    let parent = InodeId(9);
    let directory =
        Kind::Directory { class: DirectoryClass::Layer(7), parent, name: b"007".to_vec() };
    let role = Role::Tail { start: 1 << 33, directory: parent };
    let object = Some(kvfs::store::record::ObjectId(1 << 40));
    let file = FileRecord { role, object, size: 1 << 35, blocks: 8, unsettled: true };
    let checksum = Some([7; 16]);
    let kind = ObjectKind::Page;
    let copy = RemoteCopy {
        content: [3; 32],
        encoding: Encoding::Q8_0,
        stored_bytes: 300,
        state: RemoteState::Named,
    };
    let page = IndexedPage { parent: [1; 32], hash: Some([2; 32]), lead: vec![0; 12] };
    let tokens = IndexedTokens { model: parent, tokens: parent, length: 400 };
    vec![
        seed(0, &inode(directory)),
        seed(0, &inode(Kind::File(file))),
        seed(0, &inode(Kind::Symlink { target: b"../../etc".to_vec() })),
        seed(1, &Entry { inode: parent, file_type: libc::S_IFREG }),
        seed(2, &ObjectRecord { kind, length: 4096, checksum, references: 2 }),
        seed(3, &copy),
        seed(4, &EncodedCopy { encoding: Encoding::Zstd, stored_bytes: 100 }),
        seed(5, &RemoteIdentity { store: 1 << 100, remote: Some(2) }),
        seed(6, &page),
        seed(7, &tokens),
        seed(8, &Totals { objects: 3, pages: 2, bytes: 1 << 50 }),
        seed(9, &Event::new(What::Deleted, "room").of(parent).at("files/a".to_owned())),
        seed(10, &EventHeads { numbered: 9, given: [4, 0, 5] }),
    ]
}

pub(crate) fn target() -> Target {
    Target {
        name: "records",
        length_max: 400,
        seeds: seeds(),
        words: &[b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x80\x80\x80\x80\x10"],
        allocation_max: 64 << 10,
        run: Box::new(|input| {
            let Some((kind, bytes)) = input.split_first() else {
                return Outcome::refused(&"empty");
            };
            match kind % 11 {
                0 => check::<Inode>(0, bytes),
                1 => check::<Entry>(1, bytes),
                2 => check::<ObjectRecord>(2, bytes),
                3 => check::<RemoteCopy>(3, bytes),
                4 => check::<EncodedCopy>(4, bytes),
                5 => check::<RemoteIdentity>(5, bytes),
                6 => check::<IndexedPage>(6, bytes),
                7 => check::<IndexedTokens>(7, bytes),
                8 => check::<Totals>(8, bytes),
                9 => check::<Event>(9, bytes),
                _ => check::<EventHeads>(10, bytes),
            }
        }),
    }
}

/// What was read is written and read the same.
fn check<T>(kind: u8, bytes: &[u8]) -> Outcome
where
    T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    match postcard::from_bytes::<T>(bytes) {
        Err(error) => Outcome::refused(&format!("{error:?}")),
        Ok(value) => {
            let written = postcard::to_stdvec(&value).unwrap();
            assert_eq!(postcard::from_bytes::<T>(&written).unwrap(), value);
            Outcome::accepted((kind, written.len()))
        }
    }
}
