import MLX
import MLXLMCommon

/// The RoPE of a model's keys: channels are turned in pairs, by `base^(-2i / dimensions)` a position, as
/// `MLXNN.RoPE` does.
///
/// With ``H2OConfiguration/Positions/rolling(_:)`` kept keys are turned forward by the number of tokens
/// forgotten after them, so that queries see them one after the other, however long the conversation is
/// (as StreamingLLM assigns positions within the cache: Xiao et al. 2023, section 3.2). Stored keys stay
/// as they came.
public struct H2ORope: Sendable, Equatable {
    /// Channels that are turned, the first ones of a key.
    public let dimensions: Int
    /// The base of the frequencies.
    public let base: Float
    /// The factor on positions.
    public let scale: Float
    /// Whether the channels of a pair are neighbours; else they are `dimensions / 2` apart.
    public let traditional: Bool

    // Far above any model's head width.
    static let mostDimensions = 1 << 16
    // The second place of a token: a rotation by so many positions is not the identity by chance.
    private static let far = 300
    // The tolerated error of keys computed in bfloat16, as a part of the largest channel.
    private static let tolerance: Float = 0.03

    /// - Parameters:
    ///   - dimensions: Channels that are turned: a head's width, or its first part.
    ///   - base: The base of the frequencies (`rope_theta` in `config.json`).
    ///   - scale: The factor on positions.
    ///   - traditional: Whether the channels of a pair are neighbours.
    /// - Throws: ``H2OError/configuration(_:)`` for numbers that turn no keys.
    public init(
        dimensions: Int, base: Float = 10_000, scale: Float = 1, traditional: Bool = false
    ) throws {
        guard 2 ... Self.mostDimensions ~= dimensions, dimensions % 2 == 0, base.isFinite, base > 0,
            scale.isFinite
        else {
            throw H2OError.configuration(
                "A RoPE turns an even number of channels, at most \(Self.mostDimensions), by a base "
                    + "above 0 and a finite scale; got \(dimensions) channels, base \(base), scale "
                    + "\(scale).")
        }
        (self.dimensions, self.base, self.scale) = (dimensions, base, scale)
        self.traditional = traditional
    }

    /// Whether the keys that a model gives its plain caches have this RoPE.
    ///
    /// A token that is alone sees nothing but itself, wherever it stands, so in every layer its keys at two
    /// places differ by the RoPE between them, and by nothing else.
    func explainsKeys(of model: any LanguageModel, _ plain: [any KVCache]) -> Bool {
        let (here, there) = (
            Self.keys(of: model, plain, at: 0), Self.keys(of: model, plain, at: Self.far)
        )
        return !here.isEmpty && here.count == there.count
            && zip(here, there).allSatisfy { explains(from: $0, to: $1) }
    }

    private func explains(from here: MLXArray, to there: MLXArray) -> Bool {
        guard dimensions <= here.dim(3) else { return false }
        let turned = MLXFast.RoPE(
            here.asType(.float32), dimensions: dimensions, traditional: traditional, base: base,
            scale: scale, offset: Self.far)
        let expected = there.asType(.float32)
        let off = abs(turned - expected).max() / maximum(abs(expected).max(), 1e-9)
        return off.item(Float.self) < Self.tolerance
    }

    /// The keys `[1, H, 1, D]` that a model gives each plain cache for one token at some position.
    private static func keys(
        of model: any LanguageModel, _ plain: [any KVCache], at position: Int
    ) -> [MLXArray] {
        let trials = placedMembers(of: plain).map { _, cache in
            type(of: cache) == KVCacheSimple.self ? TrialCache(at: position) : nil
        }
        let members = zip(placedMembers(of: plain), trials).map { $1 ?? $0.cache }
        let output = model(
            LMInput.Text(tokens: MLXArray([1] as [Int32], [1, 1])),
            cache: replacingMembers(of: plain, with: members), state: nil)
        let keys = trials.compactMap { $0?.keys }
        eval(output.logits, keys)
        return keys
    }
}

extension H2OConfiguration {
    /// At which positions queries see the kept keys.
    public enum Positions: Sendable, Equatable {
        /// Where they came.
        case absolute
        /// One after the other, without the gaps that evicted tokens left, for conversations beyond the
        /// length that a model was trained for.
        ///
        /// It needs a model that attends through this library and has a plain RoPE, `remainder: false`
        /// (evicted tokens have no position) and unpacked rows; decode steps are not fused. The RoPE is
        /// that of the keys, or nil for the model's own, which an ``H2OModel`` tells. It is checked: a
        /// model whose keys have another RoPE, or none, is an error.
        case rolling(H2ORope? = nil)
    }

    /// The RoPE of a model's keys where positions roll; nil where they do not.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for a model whose positions cannot roll.
    func rope(of model: any LanguageModel, attends: Bool) throws -> H2ORope? {
        guard case .rolling(let given) = positions else { return nil }
        let name = String(describing: type(of: model))
        guard attends else {
            throw H2OError.configuration(
                "positions: .rolling needs attention through this library, and \(name) attends by "
                    + "itself: leave positions out.")
        }
        guard let rope = given ?? (model as? any H2OModel)?.plainRope else {
            throw H2OError.configuration(
                "positions: .rolling turns cached keys by their RoPE, and \(name) does not tell which "
                    + "it is, or has no plain one: pass .rolling(H2ORope(dimensions:base:)), or leave "
                    + "positions out.")
        }
        guard rope.explainsKeys(of: model, try plainCaches(of: model)) else {
            throw H2OError.configuration(
                "positions: .rolling turns cached keys by their RoPE, and the keys of \(name) have "
                    + "another one than \(rope), or none: leave positions out.")
        }
        return rope
    }
}
