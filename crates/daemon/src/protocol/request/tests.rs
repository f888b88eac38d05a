use zerocopy::IntoBytes;

use super::*;

/// A message of the device.
fn message(operation: u32, structure: &[u8], payload: &[u8]) -> Vec<u8> {
    let length = size_of::<InHeader>() + structure.len() + payload.len();
    let header = InHeader {
        len: u32::try_from(length).unwrap(),
        opcode: operation,
        unique: 8,
        nodeid: 7,
        ..InHeader::default()
    };
    [header.as_bytes(), structure, payload].concat()
}

#[test]
fn a_message_is_split_where_names_and_bytes_begin() {
    let create = CreateIn { flags: 1, mode: 0o100_644, umask: 0, open_flags: 0 };
    let write = TransferIn { fh: 3, size: 5, ..TransferIn::default() };
    let open = OpenIn { flags: 2, open_flags: 0 };
    let cases: [(u32, &[u8], &[u8]); 5] = [
        (opcode::LOOKUP, &[], b"name\0"),
        (opcode::CREATE, create.as_bytes(), b"name\0"),
        (opcode::WRITE, write.as_bytes(), b"bytes"),
        (opcode::OPEN, open.as_bytes(), b""),
        (opcode::SYMLINK, &[], b"name\0target\0"),
    ];
    for (operation, structure, payload) in cases {
        let message = message(operation, structure, payload);
        let request = Request::of_message(&message).unwrap();
        assert_eq!((request.structure, request.payload), (structure, payload), "{operation}");
        assert_eq!((request.header.unique, request.inode()), (8, InodeId(7)), "{operation}");
    }
}

#[test]
fn names_become_places() {
    let parent = InodeId(7);
    let place = |name: &[u8]| Place { parent, name: name.to_vec() };
    let rename = Rename2In { newdir: 9, flags: 1, padding: 0 };
    let renaming = message(opcode::RENAME2, rename.as_bytes(), b"old\0new\0");
    let Some(Call::Rename(from, to, 1)) = take_named(&Request::of_message(&renaming).unwrap())
    else {
        panic!("a rename is a rename");
    };
    assert_eq!((from, to.parent, &to.name[..]), (place(b"old"), InodeId(9), &b"new"[..]));
    let setting = SetXattrIn { size: 3, flags: 2 };
    let setting = message(opcode::SETXATTR, setting.as_bytes(), b"user.a\0v\0w");
    let setting = take_named(&Request::of_message(&setting).unwrap());
    let Some(Call::SetExtendedAttribute(name, value, 2)) = setting else {
        panic!("an attribute is set");
    };
    assert_eq!((&name[..], &value[..]), (&b"user.a"[..], &b"v\0w"[..]));
}

#[test]
fn what_is_not_whole_asks_for_nothing() {
    let link = LinkIn { oldnodeid: 5 };
    let whole = message(opcode::LINK, link.as_bytes(), b"name\0");
    assert!(take_named(&Request::of_message(&whole).unwrap()).is_some());
    for length in 0..whole.len() {
        let mut part = whole[..length].to_vec();
        // As long as it was to be, and as long as it is.
        assert!(Request::of_message(&part).is_none(), "{length}");
        if let Some(told) = part.get_mut(..4) {
            told.copy_from_slice(u32::try_from(length).unwrap().as_bytes());
        }
        let request = Request::of_message(&part);
        assert!(request.and_then(|request| take_named(&request)).is_none(), "{length}");
    }
}

#[test]
fn other_operations_are_refused_as_unknown() {
    for operation in [36, 40, 51, 52, 4096] {
        let message = message(operation, &[0; 16], b"");
        let call = take_named(&Request::of_message(&message).unwrap());
        assert!(matches!(call, Some(Call::Refuse(Errno::ENOSYS))), "{operation}");
    }
}
