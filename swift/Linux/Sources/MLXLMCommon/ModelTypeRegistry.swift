import Foundation

public enum ModelFactoryError: LocalizedError {
    case unsupportedModelType(String)
    case invalidConfiguration(String)

    public var errorDescription: String? {
        switch self {
        case .unsupportedModelType(let type): "Unsupported model type: \(type)"
        case .invalidConfiguration(let message): "Invalid configuration: \(message)"
        }
    }
}

/// Makes models by the `model_type` of their configuration.
public actor ModelTypeRegistry<T> {
    private var creators: [String: (Data) throws -> T]

    public init() { creators = [:] }
    public init(creators: [String: (Data) throws -> T]) { self.creators = creators }

    /// Replaces what was registered for the type.
    public func registerModelType(_ type: String, creator: @escaping (Data) throws -> T) {
        creators[type] = creator
    }

    public func createModel(configuration: Data, modelType: String) throws -> sending T {
        guard let create = creators[modelType] else {
            throw ModelFactoryError.unsupportedModelType(modelType)
        }
        return try create(configuration)
    }

    public func contains(_ modelType: String) -> Bool { creators[modelType] != nil }
}
