//! Which IP addresses belong to the public internet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether an address is reachable through the public internet.
///
/// Addresses for one machine, one link, one organisation, documentation and other special uses are
/// not public, and neither are IPv6 addresses that contain such an IPv4 address.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = a == 0
        || a >= 240 // reserved, and the broadcast address
        || (a == 100 && b & 0xc0 == 64) // carrier-grade NAT
        || (a, b, c) == (192, 0, 0) // protocol assignments
        || (a == 198 && b & 0xfe == 18); // benchmarks of networks
    let reserved = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation();
    !(special || reserved)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    // Translation between IPv6 and IPv4 (NAT64): the last 32 bits are the IPv4 address.
    if segments[..6] == [0x64, 0xff9b, 0, 0, 0, 0] {
        let [.., a, b, c, d] = address.octets();
        return is_public_v4(Ipv4Addr::new(a, b, c, d));
    }
    let [first, second, ..] = segments;
    let is_special = match first {
        0x2001 => second < 0x200 || second == 0xdb8, // protocol assignments, documentation
        0x2002 => true,                              // 6to4: contains an IPv4 address
        0x3fff => second < 0x1000,                   // documentation
        _ => false,
    };
    // Only 2000::/3 is assigned to the public internet; this excludes `::1`, `::ffff:a.b.c.d`,
    // `fc00::/7` and `fe80::/10`.
    first & 0xe000 == 0x2000 && !is_special
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_public_internet_are_public() {
        let of = |text: &str| is_public(text.parse().unwrap());
        for public in [
            "93.184.216.34",
            "1.1.1.1",
            "100.128.0.1",
            "172.32.0.1",
            "2606:4700::1",
            "64:ff9b::101:101",
        ] {
            assert!(of(public), "{public}");
        }
        for other in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:10.0.0.1",
            "::ffff:1.1.1.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "3fff::1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!of(other), "{other}");
        }
    }
}
