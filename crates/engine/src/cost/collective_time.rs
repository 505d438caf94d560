//! Time of collectives, predicted from sizes and rates.

/// GPUs and their connections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cluster {
    /// Number of GPUs of a node.
    pub gpus: usize,
    /// Number of nodes.
    pub nodes: usize,
    /// Rate of a GPU to the others of its node, in bytes per second.
    pub link: f64,
    /// Rate of a GPU to other nodes, in bytes per second.
    pub network: f64,
    /// Operations per second of a GPU on the matrix products of a model.
    pub flops: f64,
}

/// What the ranks of a step exchange, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTraffic {
    /// Weights of a pass over the model.
    pub weights: f64,
    /// Weights of the largest stage.
    pub stage: f64,
    /// Gradients.
    pub gradients: f64,
    /// Number of micro-batches of a rank.
    pub rounds: f64,
    /// Number of ranks that divide the state.
    pub group: usize,
}

/// Seconds of a step's collectives.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CollectiveTime {
    /// While the ranks compute.
    pub hidden: f64,
    /// While they wait.
    pub exposed: f64,
}

impl CollectiveTime {
    /// All collectives.
    pub fn total(self) -> f64 {
        self.hidden + self.exposed
    }

    /// The time of a step that computes for `compute` seconds. At most nine tenths of the
    /// computation hide collectives: the first and the last stage have nothing to hide behind.
    pub fn step(self, compute: f64) -> f64 {
        compute + self.exposed + (self.hidden - 0.9 * compute).max(0.0)
    }
}

impl Cluster {
    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.gpus * self.nodes
    }

    /// Seconds in which each of `ranks` ranks receives the shares of the others of `bytes`. They
    /// first exchange within a node, then each rank the part of its place with those of other
    /// nodes. A sum that leaves each rank a share takes as long.
    pub fn gather(&self, bytes: f64, ranks: usize) -> f64 {
        let within = ranks.min(self.gpus) as f64;
        let nodes = (ranks as f64 / within).ceil();
        let in_node = bytes * (within - 1.0) / within / self.link;
        in_node + bytes / within * (nodes - 1.0) / nodes / self.network
    }

    /// Seconds in which the shard groups add up their shares of gradients.
    fn across_groups(&self, traffic: &StepTraffic) -> f64 {
        let groups = (self.world() / traffic.group) as f64;
        let share = traffic.gradients / traffic.group as f64;
        let rate = if traffic.group >= self.gpus { self.network } else { self.link };
        2.0 * share * (groups - 1.0) / groups / rate
    }

    /// Every rank has everything: sums in each of `sums` rounds, and one copy of the results.
    pub fn replicated(&self, traffic: &StepTraffic, sums: f64) -> CollectiveTime {
        let hidden = (sums + 1.0) * self.gather(traffic.gradients, self.world());
        CollectiveTime { hidden, exposed: 0.0 }
    }

    /// Each rank has a share of the optimizer state: sums in each of `sums` rounds, and a copy of
    /// the updated weights, for which the ranks wait.
    pub fn sharded_state(&self, traffic: &StepTraffic, sums: f64) -> CollectiveTime {
        let across = self.across_groups(traffic);
        CollectiveTime {
            hidden: sums * (self.gather(traffic.gradients, traffic.group) + across),
            exposed: self.gather(traffic.weights, traffic.group),
        }
    }

    /// Each rank has a share of everything: weights are copied twice in each round. The ranks wait
    /// for two stages of a round, which are counted as the largest one.
    pub fn sharded_weights(&self, traffic: &StepTraffic) -> CollectiveTime {
        let weights = 2.0 * self.gather(traffic.weights, traffic.group);
        let sums = self.gather(traffic.gradients, traffic.group) + self.across_groups(traffic);
        let exposed = 2.0 * self.gather(traffic.stage, traffic.group);
        let hidden = weights + sums - exposed;
        CollectiveTime { hidden: traffic.rounds * hidden, exposed: traffic.rounds * exposed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: Cluster = Cluster { gpus: 8, nodes: 4, link: 100.0, network: 10.0, flops: 1.0 };

    #[test]
    fn a_gather_crosses_each_link_once() {
        assert_eq!(CLUSTER.gather(800.0, 1), 0.0);
        assert_eq!(CLUSTER.gather(800.0, 8), 7.0);
        // each rank brings an eighth from the other three nodes
        assert_eq!(CLUSTER.gather(800.0, 32), 7.0 + 100.0 * 0.75 / 10.0);
    }

    #[test]
    fn dividing_the_optimizer_costs_no_more_than_a_sum_of_gradients() {
        let traffic =
            StepTraffic { weights: 400.0, stage: 40.0, gradients: 800.0, rounds: 4.0, group: 32 };
        let all = CLUSTER.replicated(&traffic, 1.0).total();
        assert!(CLUSTER.sharded_state(&traffic, 1.0).total() < all);
        assert!(CLUSTER.sharded_weights(&traffic).total() > all);
    }

    #[test]
    fn groups_within_a_node_exchange_weights_within_it() {
        let traffic =
            StepTraffic { weights: 400.0, stage: 40.0, gradients: 800.0, rounds: 1.0, group: 8 };
        let time = CLUSTER.sharded_state(&traffic, 1.0);
        assert_eq!(time.exposed, 400.0 * 7.0 / 8.0 / 100.0);
        assert_eq!(time.hidden, 7.0 + 2.0 * 100.0 * 0.75 / 10.0);
    }

    #[test]
    fn collectives_that_fit_behind_the_computation_cost_nothing() {
        let time = CollectiveTime { hidden: 8.0, exposed: 1.0 };
        assert_eq!(time.step(10.0), 11.0);
        assert_eq!(time.step(5.0), 5.0 + 1.0 + 3.5);
    }
}
