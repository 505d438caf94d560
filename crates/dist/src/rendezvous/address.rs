//! The address of rank 0: where it listens, and where the others connect to.

use crate::config::Distributed;
use crate::launcher::{JOB, Launched};
use ranks::DistError;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;

/// Ports of jobs whose launcher sets none: from 15000 to 24999.
const PORTS: std::ops::Range<u32> = 15_000..25_000;

/// Time in which a port that is in use may become free.
const IN_USE: Duration = Duration::from_secs(1);

/// Host name or IP address, and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl Address {
    /// The IP addresses of the host, with the port.
    pub(super) fn resolve(&self) -> Result<Vec<SocketAddr>, String> {
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        let found: Vec<SocketAddr> = found.map_err(|error| error.to_string())?.collect();
        if found.is_empty() { Err("the host has no address".to_owned()) } else { Ok(found) }
    }
}

/// The address at which the other ranks find rank 0.
pub(crate) fn of_first(place: &Launched, config: &Distributed) -> Result<Address, DistError> {
    let launcher = place.launcher;
    let port = config.port.or(place.port).or_else(|| port_of(&place.job));
    let port = port.ok_or(DistError::NoPort { launcher })?;
    let host = match (&config.interface, &place.host) {
        (Some(interface), _) if place.is_one_machine() => address_of(interface)?.to_string(),
        (None, _) if place.is_one_machine() => Ipv4Addr::LOCALHOST.to_string(),
        (_, Some(host)) => host.trim_matches(['[', ']']).to_owned(),
        (_, None) => return Err(DistError::NoHost { launcher }),
    };
    Ok(Address { host, port })
}

/// Listens as rank 0: on `distributed.interface`, else on loopback if all ranks are on one machine,
/// else on the address that the others connect to. If this machine does not have that address
/// (a service of Kubernetes, or a host name that resolves to 127.0.1.1), on all interfaces.
pub(crate) fn listen(place: &Launched, config: &Distributed) -> Result<TcpListener, DistError> {
    let address = of_first(place, config)?;
    let failed = |address: &dyn fmt::Display, problem: &dyn fmt::Display| DistError::Listen {
        address: address.to_string(),
        problem: problem.to_string(),
    };
    if let Some(interface) = &config.interface {
        let address = SocketAddr::new(address_of(interface)?, address.port);
        return bind(address).map_err(|error| failed(&address, &error));
    }
    let means_loopback = address.host == "localhost" || address.host.parse::<IpAddr>().is_ok();
    let usable = |found: &SocketAddr| means_loopback || !found.ip().is_loopback();
    let resolved = address.resolve().map_err(|problem| failed(&address, &problem))?;
    for address in resolved.into_iter().filter(usable) {
        match bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
            result => return result.map_err(|error| failed(&address, &error)),
        }
    }
    warn!(
        "rank 0 listens on all interfaces, because {address} is not an address of this machine; \
         `distributed.interface` selects one"
    );
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port);
    bind(any).map_err(|error| failed(&any, &error))
}

/// Returns a warning if ranks of another job can connect to rank 0: it listens at `at`, which other
/// machines reach, and its job has no name.
pub(crate) fn open_to_others(place: &Launched, at: SocketAddr) -> Option<String> {
    let is_open = place.job.is_empty() && !at.ip().is_loopback();
    is_open.then(|| {
        format!(
            "rank 0 listens on {at}, and {} gives this job no name: a process of another job that \
             connects there by mistake counts as a rank. Set `{JOB}` for all ranks to a name of your \
             choice",
            place.launcher
        )
    })
}

/// Binds to an address. Another process may still use the port for a moment: a rank of an earlier
/// attempt that ends, or a connection for which the system chose the port.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let deadline = Instant::now() + IN_USE;
    loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

/// A port that is the same for all ranks of a job, and usually another for another job.
fn port_of(job: &str) -> Option<u16> {
    let hash = job.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193) // FNV-1a
    });
    let port = PORTS.start + hash % (PORTS.end - PORTS.start);
    u16::try_from(port).ok().filter(|_| !job.is_empty())
}

/// Whether `interface` is the name or the address of an interface.
fn is_of(interface: &str, found: &if_addrs::Interface) -> bool {
    found.name == interface || interface.parse() == Ok(found.ip())
}

/// The name of an interface of this machine that is given by its name or address.
pub fn interface_name(interface: &str) -> Option<String> {
    let all = if_addrs::get_if_addrs().ok()?;
    all.into_iter().find(|found| is_of(interface, found)).map(|found| found.name)
}

/// The IP address of an interface that is given by its name or address; IPv4 if it has both.
fn address_of(interface: &str) -> Result<IpAddr, DistError> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    let wanted = all.iter().filter(|found| is_of(interface, found));
    let mut wanted: Vec<IpAddr> = wanted.map(if_addrs::Interface::ip).collect();
    wanted.sort_by_key(IpAddr::is_ipv6);
    wanted.first().copied().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|one| format!("{} ({})", one.name, one.ip())).collect();
        let found = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        DistError::Interface { interface: interface.to_owned(), found }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ranks::Launcher;

    fn place(local_world: Option<usize>, host: Option<&str>, port: Option<u16>) -> Launched {
        Launched {
            launcher: Launcher::OpenMpi,
            rank: 0,
            world: 2,
            local_rank: None,
            local_world,
            host: host.map(str::to_owned),
            port,
            job: "17.0".to_owned(),
        }
    }

    fn config(interface: Option<&str>, port: Option<u16>) -> Distributed {
        Distributed { interface: interface.map(str::to_owned), port, ..Distributed::default() }
    }

    #[test]
    fn the_address_of_rank_0_follows_from_launcher_and_config() {
        let none = config(None, None);
        for (place, config, expected) in [
            (place(Some(2), Some("n1"), Some(7)), &none, "127.0.0.1:7"),
            (place(Some(2), None, None), &none, "127.0.0.1:21663"),
            (place(Some(1), Some("n1"), Some(7)), &none, "n1:7"),
            (place(None, Some("[fd00::1]"), Some(7)), &none, "[fd00::1]:7"),
            (place(None, Some("n1"), Some(7)), &config(None, Some(8)), "n1:8"),
            (place(None, Some("n1"), Some(7)), &config(Some("lo"), None), "n1:7"),
            (place(Some(2), Some("n1"), Some(7)), &config(Some("lo"), None), "127.0.0.1:7"),
            (place(Some(2), Some("n1"), Some(7)), &config(Some("127.0.0.1"), None), "127.0.0.1:7"),
        ] {
            assert_eq!(of_first(&place, config).unwrap().to_string(), expected);
        }
    }

    #[test]
    fn an_unknown_address_is_an_error() {
        let none = config(None, None);
        let error = of_first(&place(Some(1), None, None), &none).unwrap_err();
        assert_eq!(error, DistError::NoHost { launcher: Launcher::OpenMpi });
        let unnamed = Launched { job: String::new(), ..place(Some(2), None, None) };
        let error = of_first(&unnamed, &none).unwrap_err();
        assert_eq!(error, DistError::NoPort { launcher: Launcher::OpenMpi });
        let error = listen(&place(Some(2), None, None), &config(Some("eth77"), None)).unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("`distributed.interface` is `eth77`, but this"), "{message}");
        assert!(message.contains("lo (127.0.0.1)"), "{message}");
    }

    #[test]
    fn an_interface_has_the_same_name_by_its_name_and_by_its_address() {
        for interface in ["lo", "127.0.0.1"] {
            assert_eq!(interface_name(interface).as_deref(), Some("lo"));
        }
        assert_eq!(interface_name("192.0.2.1"), None);
    }

    #[test]
    fn ranks_on_one_machine_listen_on_loopback_only() {
        for config in
            [config(None, None), config(Some("lo"), None), config(Some("127.0.0.1"), None)]
        {
            let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let place = place(Some(2), Some("192.0.2.1"), Some(free));
            let listener = listen(&place, &config).unwrap();
            assert!(listener.local_addr().unwrap().ip().is_loopback());
        }
    }

    #[test]
    fn a_job_without_a_name_on_an_open_port_is_warned_about() {
        let named = place(None, Some("n1"), Some(7));
        let unnamed = Launched { job: String::new(), ..named.clone() };
        let warning = |place: &Launched, at: &str| open_to_others(place, at.parse().unwrap());
        for at in ["0.0.0.0:7", "192.0.2.1:7", "[fd00::1]:7"] {
            let text = warning(&unnamed, at).unwrap();
            let expected = format!("rank 0 listens on {at}, and OpenMPI gives this job no name");
            assert!(text.starts_with(&expected) && text.contains("`TRAINER_JOB_ID`"), "{text}");
            assert_eq!(warning(&named, at), None);
        }
        for at in ["127.0.0.1:7", "[::1]:7"] {
            assert_eq!(warning(&unnamed, at), None);
        }
    }

    #[test]
    fn a_port_in_use_is_an_error() {
        let used = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = used.local_addr().unwrap().port();
        let place = place(None, Some("localhost"), Some(port));
        let error = listen(&place, &config(None, None)).unwrap_err();
        let expected = format!("rank 0 cannot listen on 127.0.0.1:{port}: Address already in use");
        // `localhost` may be `::1` too, where the port is free
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
}
