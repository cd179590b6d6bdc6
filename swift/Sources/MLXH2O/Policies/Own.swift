import CMLXH2O
import MLX

/// What one call of the attention told about N slots of H KV heads.
public struct H2OPolicyObservation {
    /// `[B, Hq, L, N]` float32, minus infinity where masked.
    public let logits: MLXArray
    /// `[B, Hq, L]` float32, with every column that answered (remainder, attention sinks).
    public let logSumExp: MLXArray
    /// Attention that each slot received from the observed queries, `[B, H, N]`.
    public let mass: MLXArray
    /// How many queries each observed one stands for, per slot `[N]`; nil is 1 each.
    public let standsFor: MLXArray?
}

/// The attended slots of H KV heads, as a policy sees them.
public struct H2OPolicySlots {
    /// `[B, H, N, D]`.
    public let keys: MLXArray
    /// `[B, H, N, Dv]`.
    public let values: MLXArray
    /// Logical position of each slot's token, `[B, H, N]` int32.
    public let positions: MLXArray
    /// What the policy has accumulated, `[B, H, N]` float32; nil where it needs no attention.
    public let scores: MLXArray?
    /// True where the slot may go, `[B, H, N]`.
    public let evictable: MLXArray
    /// Their mean key `[B, H, D]` float32 (zeros while there are none).
    public let evictedMeanKey: MLXArray
    /// The next logical position.
    public let offset: Int
    /// How many tokens each head has lost so far.
    public let evicted: Int

    /// Steps since each token came, its own included: `[B, H, N]` float32, at least 1.
    public var ages: MLXArray { (MLXArray(Int32(offset)) - positions).asType(.float32) }
}

extension H2OPolicies {
    /// A policy of the app's own: two functions that give lazy arrays `[B, H, N]` float32.
    ///
    /// Its steps go operation by operation, in no kernel. Where a function throws in a step, the process
    /// ends with its message, since attention cannot throw. Make it known by ``register(_:)`` to load
    /// files that were saved with it.
    public struct Own: H2OPolicy {
        /// Scores after an observation, of those before it; new slots start at 0.
        public typealias Accumulate = @Sendable (MLXArray, H2OPolicyObservation) throws -> MLXArray
        /// What each slot is worth keeping; the lowest goes first.
        public typealias Priority = @Sendable (H2OPolicySlots) throws -> MLXArray

        public let name: String
        public var options = H2OPolicyOptions()
        public let needsAttention: Bool
        let accumulate: Accumulate?
        let priority: Priority

        /// - Parameters:
        ///   - name: Its name in files.
        ///   - needsAttention: Whether there are scores; without, it can serve in any model.
        ///   - accumulate: Scores after an observation; nil sums the mass.
        ///   - priority: What each slot is worth.
        public init(
            name: String, needsAttention: Bool = true, accumulate: Accumulate? = nil,
            priority: @escaping Priority
        ) {
            (self.name, self.needsAttention) = (name, needsAttention)
            (self.accumulate, self.priority) = (accumulate, priority)
            options.prompt = needsAttention ? .window : .full
        }
    }
}

/// The functions of an app's policy, as the engine calls them.
private final class OwnFunctions {
    let policy: H2OPolicies.Own

    init(_ policy: H2OPolicies.Own) { self.policy = policy }

    static func of(_ context: UnsafeMutableRawPointer?) -> OwnFunctions {
        Unmanaged<OwnFunctions>.fromOpaque(context!).takeUnretainedValue()
    }

    /// Runs a function and hands its array over; 1 where it throws, which the log says.
    static func give(
        _ result: UnsafeMutablePointer<mlx_array>?, _ body: () throws -> MLXArray
    ) -> Int32 {
        do {
            // A name keeps the array until it is handed over.
            let array = try body()
            return withExtendedLifetime(array) { mlx_array_set(result, array.ctx) }
        } catch {
            H2ONotice(
                subject: .policy,
                message: "A policy of the app's own failed: \(error.localizedDescription)"
            ).log()
            return 1
        }
    }

    /// One more reference to an array that stays the engine's; nil for an empty handle.
    static func shared(_ handle: mlx_array) -> MLXArray? {
        guard handle.ctx != nil else { return nil }
        var own = mlx_array_new()
        mlx_array_set(&own, handle)
        return MLXArray(own)
    }

    static func observation(_ view: mlx_h2o_observation) -> H2OPolicyObservation {
        H2OPolicyObservation(
            logits: shared(view.logits)!, logSumExp: shared(view.lse)!, mass: shared(view.mass)!,
            standsFor: shared(view.stands_for))
    }

    static func slots(_ view: mlx_h2o_slots, hasScores: Bool) -> H2OPolicySlots {
        H2OPolicySlots(
            keys: shared(view.keys)!, values: shared(view.values)!,
            positions: shared(view.positions)!, scores: hasScores ? shared(view.scores) : nil,
            evictable: shared(view.evictable)!, evictedMeanKey: shared(view.evicted_mean_key)!,
            offset: Int(view.offset), evicted: Int(view.evicted))
    }
}

extension H2OPolicies.Own {
    /// The policy in the engine, which holds the functions for as long as a cache needs them.
    func inEngine() throws -> mlx_h2o_policy {
        let context = Unmanaged.passRetained(OwnFunctions(self))
        var functions = mlx_h2o_policy_functions()
        functions.size = MemoryLayout<mlx_h2o_policy_functions>.size
        functions.needs_attention = needsAttention
        functions.context = context.toOpaque()
        if accumulate != nil {
            functions.accumulate = { context, result, scores, observation, _ in
                OwnFunctions.give(result) {
                    try OwnFunctions.of(context).policy.accumulate!(
                        OwnFunctions.shared(scores)!, OwnFunctions.observation(observation!.pointee)
                    )
                }
            }
        }
        functions.priority = { context, result, slots, _ in
            OwnFunctions.give(result) {
                let policy = OwnFunctions.of(context).policy
                return try policy.priority(
                    OwnFunctions.slots(slots!.pointee, hasScores: policy.needsAttention))
            }
        }
        functions.destroy = { Unmanaged<OwnFunctions>.fromOpaque($0!).release() }
        var made = mlx_h2o_policy_new()
        do {
            try checkEngine(mlx_h2o_policy_own(&made, name, &functions))
        } catch {
            context.release()
            throw error
        }
        return made
    }
}
