import Foundation
import MLXLMCommon

/// Makes models by their types; this one loads none.
public final class LLMModelFactory: Sendable {
    public let typeRegistry: ModelTypeRegistry<LanguageModel>

    public init(
        typeRegistry: ModelTypeRegistry<LanguageModel>, modelRegistry: AbstractModelRegistry
    ) {
        self.typeRegistry = typeRegistry
    }

    public func loadContainer(
        from directory: URL, using tokenizerLoader: any TokenizerLoader
    ) async throws -> ModelContainer {
        throw ModelFactoryError.invalidConfiguration("This stand-in loads no models.")
    }

    public static let shared = LLMModelFactory(
        typeRegistry: LLMTypeRegistry.shared, modelRegistry: LLMRegistry.shared)
}

public enum LLMRegistry {
    public static let shared = AbstractModelRegistry()
}
